//! `cargo xtask hosts`: a run over two machines, which are network namespaces of this one.
//!
//! Each namespace has an interface of its own, and `mpirun` reaches the other one as it reaches a node, over TCP;
//! only `ip netns exec` stands for `ssh`. The run's log is compared with one rank's. It needs root, and Open MPI.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;

use crate::cube::succeed;
use crate::workspace;

/// Name and address of each host.
const HOSTS: [(&str, &str); 2] = [("aligner-host-1", "10.79.0.1"), ("aligner-host-2", "10.79.0.2")];

/// How far figures of many ranks may be from one rank's.
const TOLERANCE: f64 = 1e-3;

#[derive(Args)]
pub(crate) struct Options {
    /// The run file; with its mesh it has to want four ranks.
    #[arg(long, default_value = "examples/demo_dpo.toml")]
    run: PathBuf,
    /// Settings of the mesh.
    #[arg(long = "set", default_values_t = ["mesh.tp=2".to_string(), "mesh.dp=2".to_string()])]
    settings: Vec<String>,
    /// Steps.
    #[arg(long, default_value_t = 8)]
    steps: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = workspace::root();
    let mut build = Command::new("cargo");
    build.args(["build", "--release", "--workspace", "--features", "aligner-cli/mpi", "--bin", "aligner"]);
    succeed(build.current_dir(&root))?;
    let program = root.join("target/release/aligner");
    let place = root.join("target/hosts");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let train = |name: &str| {
        let mut arguments =
            vec!["train".to_string(), options.run.display().to_string(), "--overwrite".into()];
        let dir = format!("run.dir={}", place.join(name).display());
        for setting in [dir, format!("run.steps={}", options.steps)] {
            arguments.extend(["--set".to_string(), setting]);
        }
        arguments
    };
    succeed(Command::new(&program).args(train("one")).current_dir(&root))?;
    let network = Network::new()?;
    let agent = write_agent(&place)?;
    let mut launch = Command::new("ip");
    launch.args(["netns", "exec", HOSTS[0].0, "mpirun"]);
    launch.args(["--allow-run-as-root", "--oversubscribe", "-np", "4", "-H"]);
    launch.arg(HOSTS.map(|(_, address)| format!("{address}:2")).join(","));
    launch.args(["--mca", "plm_rsh_agent"]).arg(&agent);
    launch.args(["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "10.79.0.0/24"]);
    launch.args(["--mca", "oob_tcp_if_include", "10.79.0.0/24", "-x", "RAYON_NUM_THREADS=1"]);
    launch.arg(&program).args(train("two"));
    for setting in &options.settings {
        launch.args(["--set", setting]);
    }
    succeed(launch.current_dir(&root))?;
    drop(network);
    compare(&place)
}

/// Two namespaces and the wire between them, as long as it lives.
struct Network;

impl Network {
    fn new() -> Result<Self> {
        let network = Self;
        // What a run that was killed has left.
        Self::remove();
        let [(first, one), (second, two)] = HOSTS;
        for arguments in [
            format!("netns add {first}"),
            format!("netns add {second}"),
            format!("link add wire0 netns {first} type veth peer name wire0 netns {second}"),
        ] {
            ip(&arguments)?;
        }
        for (host, address) in [(first, one), (second, two)] {
            for arguments in [
                format!("addr add {address}/24 dev wire0"),
                "link set wire0 up".into(),
                "link set lo up".into(),
            ] {
                ip(&format!("-n {host} {arguments}"))?;
            }
        }
        Ok(network)
    }

    fn remove() {
        for (host, _) in HOSTS {
            // It may not be there.
            let _ = Command::new("ip").args(["netns", "delete", host]).output();
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        Self::remove();
    }
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output().context("cannot run `ip`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`ip {arguments}`: {}; it needs root", said.trim());
    Ok(())
}

/// What `mpirun` calls with a host and a command, as it would call `ssh`.
fn write_agent(place: &Path) -> Result<PathBuf> {
    let cases = HOSTS.map(|(host, address)| format!("{address}) host={host};;\n"));
    let script = format!(
        "#!/bin/sh\n# Runs a command on a host that is a network namespace.\naddress=$1\nshift\ncase $address in\n{}*) echo \
         \"no host $address\" >&2; exit 1;;\nesac\nexec ip netns exec $host sh -c \"$*\"\n",
        cases.concat()
    );
    let path = place.join("agent.sh");
    fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Compares every figure of both logs that does not tell of time.
fn compare(place: &Path) -> Result<()> {
    let records = |name: &str| -> Result<Vec<Value>> {
        let path = place.join(name).join("metrics.jsonl");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    };
    let (one, two) = (records("one")?, records("two")?);
    ensure!(one.len() == two.len(), "{} records on one rank, {} on four", one.len(), two.len());
    let (mut compared, mut farthest) = (0, 0.0_f64);
    for (one, two) in one.iter().zip(&two) {
        for name in ["loss", "grad_norm", "rewards/margins", "rewards/accuracies"] {
            let (Some(a), Some(b)) = (one[name].as_f64(), two[name].as_f64()) else { continue };
            let far = (a - b).abs() / a.abs().max(1.0);
            ensure!(far < TOLERANCE, "step {}: {name} is {a} on one rank and {b} on two hosts", one["step"]);
            compared += 1;
            farthest = farthest.max(far);
        }
    }
    ensure!(compared > 0, "the logs have no figures to compare");
    println!("{compared} figures of {} records agree within {farthest:.1e}", one.len());
    Ok(())
}
