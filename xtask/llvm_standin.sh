#!/bin/sh
# Unpacks Debian's LLVM 22 under a directory (the first argument) where CubeCL's build looks for its
# own LLVM 23, which it would download otherwise. It needs apt and dpkg of a Debian that has the packages, and no
# rights: nothing is installed. Set XDG_DATA_HOME to the directory to build with it.
#
# CubeCL's bindings are made for LLVM 23; that kernels run with 22 is this project's finding, not a promise
# of CubeCL's makers.
set -eu
base=${1:?expected a directory to unpack into}
mkdir -p "$base"
base=$(cd "$base" && pwd)
place="$base/tracel/tracel-llvm-23.1.0-4"
if [ -e "$place/.tracel-llvm-installed" ]; then
  exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  echo "apt-get and dpkg are needed: LLVM 22 comes from Debian's packages" >&2
  exit 1
fi
mkdir -p "$base/packages" "$place/bin"
cd "$base/packages"
if ! apt-get download llvm-22-dev llvm-22 libz3-4 libzstd1 zlib1g; then
  echo "apt gave no LLVM 22: run \`apt-get update\` first, or add a Debian source that has llvm-22-dev" >&2
  exit 1
fi
for package in *.deb; do
  dpkg -x "$package" "$base/unpacked"
done
rm -f -- *.deb

llvm="$base/unpacked/usr/lib/llvm-22"
ln -sfn "$llvm/include" "$place/include"
ln -sfn "$llvm/lib" "$place/lib"
# The names that a linker looks for; the packages with them would bring more than these.
for library in z zstd; do
  file=$(find "$base/unpacked" -name "lib$library.so.1" | head -n 1)
  ln -sfn "$file" "$llvm/lib/lib$library.so"
done
# Z3 and libxml2 serve parts of LLVM that CubeCL does not link.
cat >"$place/bin/llvm-config" <<CONFIG
#!/bin/sh
libraries=\$(find "$base/unpacked" -name libz3.so.4 | head -n 1)
export LD_LIBRARY_PATH="\${libraries%/*}\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
"$llvm/bin/llvm-config" "\$@" | sed -e 's#[^ ]*libz3[^ ]*##g' -e 's#-lxml2##g' -e 's#-lPolly[A-Za-z]*##g'
CONFIG
chmod +x "$place/bin/llvm-config"
"$place/bin/llvm-config" --version >/dev/null
touch "$place/.tracel-llvm-installed"
echo "LLVM 22 stands in $place"
