//! Files of `torch.save`: broken ones, and pickles that ask for more than tensors.

use aligner_core::weights::Checkpoint;
use proptest::prelude::*;

use super::{CONFIG, Scratch, assert_little_memory, mutations};

/// A zip archive of records as they are; `method` is what it says of their compression.
fn archive(records: &[(&str, &[u8])], method: u16) -> Vec<u8> {
    let (mut out, mut list) = (Vec::new(), Vec::new());
    for (name, bytes) in records {
        let start = out.len() as u32;
        let sizes = [bytes.len() as u32; 2].map(u32::to_le_bytes).concat();
        let name_len = (name.len() as u16).to_le_bytes();
        out.extend([b"PK\x03\x04".as_slice(), &[0; 4], &method.to_le_bytes(), &[0; 8], &sizes].concat());
        out.extend([&name_len, [0; 2].as_slice(), name.as_bytes(), bytes].concat());
        list.extend([b"PK\x01\x02".as_slice(), &[0; 6], &method.to_le_bytes(), &[0; 8], &sizes].concat());
        list.extend([name_len.as_slice(), &[0; 12], &start.to_le_bytes(), name.as_bytes()].concat());
    }
    let (start, count) = (out.len() as u32, (records.len() as u16).to_le_bytes());
    let len = (list.len() as u32).to_le_bytes();
    out.extend(list);
    out.extend(
        [b"PK\x05\x06".as_slice(), &[0; 4], &count, &count, &len, &start.to_le_bytes(), &[0; 2]].concat(),
    );
    out
}

/// A pickle of `{"w": tensor}`: four numbers in storage `0`, of a shape of one axis.
fn pickle(shape: u8, stride: u8, offset: u8, storage: u8) -> Vec<u8> {
    [
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(".as_slice(),
        b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK",
        &[storage, b't', b'Q', b'K', offset, b'K', shape, 0x85, b'K', stride, 0x85, 0x89],
        b"ccollections\nOrderedDict\n)RtRs.",
    ]
    .concat()
}

fn valid_pytorch() -> Vec<u8> {
    archive(&[("x/data.pkl", &pickle(4, 1, 0, 4)), ("x/byteorder", b"little"), ("x/data/0", &[7; 16])], 0)
}

/// Opens and reads everything; the message where it does not work.
fn read_pytorch(scratch: &Scratch, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(scratch.dir.path().join("config.json"), CONFIG).unwrap();
    scratch.write(bytes);
    let checkpoint = Checkpoint::open(scratch.dir.path()).map_err(|error| error.to_string())?;
    let read = |name: &str| checkpoint.read(name).map(drop).map_err(|error| error.to_string());
    checkpoint.names().try_for_each(read)
}

#[test]
fn every_truncation_and_bit_flip_of_a_pickle_is_survived() {
    let (scratch, valid) = (Scratch::new("pytorch_model.bin"), valid_pytorch());
    read_pytorch(&scratch, &valid).unwrap();
    for len in 0..valid.len() {
        let message = read_pytorch(&scratch, &valid[..len]).unwrap_err();
        assert!(message.contains("pytorch_model.bin"), "truncated to {len} bytes: {message}");
    }
    for bytes in mutations(&valid) {
        let _ = read_pytorch(&scratch, &bytes);
    }
    assert_little_memory();
}

#[test]
fn hostile_pickles_are_named_and_call_nothing() {
    let scratch = Scratch::new("pytorch_model.bin");
    let refuse = |bytes: &[u8], parts: &[&str]| {
        let message = read_pytorch(&scratch, bytes).unwrap_err();
        for part in parts.iter().chain(&["pytorch_model.bin"]) {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
    };
    let of = |pickle: &[u8]| archive(&[("x/data.pkl", pickle), ("x/data/0", &[7; 16])], 0);
    let marker = scratch.dir.path().join("called");
    let command = format!("touch {}", marker.display());
    let length = [command.len() as u8, 0, 0, 0];
    let call = [b"\x80\x02cposix\nsystem\nX".as_slice(), &length, command.as_bytes(), b"\x85R."].concat();
    refuse(&of(&call), &["posix.system"]);
    assert!(!marker.exists());
    refuse(&of(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93."), &["builtins.eval"]);
    refuse(&of(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."), &["other arguments"]);
    refuse(&of(b"\x80\x02i\n."), &["instruction 0x69"]);
    refuse(&of(b"\x80\x02}"), &["ends too soon"]);
    refuse(&of(b"\x80\x02X\xff\xff\xff\xffa."), &["ends too soon"]);
    refuse(&of(b"\x80\x02."), &["not there"]);
    refuse(&of(b"\x80\x02N."), &["expected a dictionary"]);
    refuse(&of(&[b"\x80\x02".as_slice(), &vec![b'N'; (1 << 16) + 1]].concat()), &["65536 values"]);
    // Tuples in tuples, as deep as the file is long, and a dictionary in itself.
    refuse(&of(&[b"\x80\x02N".as_slice(), &vec![0x85; 1 << 16], b"."].concat()), &["a list of 1"]);
    refuse(&of(b"\x80\x02}q\0X\x01\0\0\0ah\0s."), &["key \"a\"", "a dictionary of 1"]);
    // Each refers twice to the one before: 2^40 values, were they copied.
    let doubled =
        (0..40).fold(b"\x80\x02Nq\0".to_vec(), |bytes, _| [&bytes, b"h\0h\0\x86q\0".as_slice()].concat());
    refuse(&of(&[&doubled, b".".as_slice()].concat()), &["a list of 2"]);
    for (shape, stride, offset, storage) in [(5, 1, 0, 4), (4, 2, 0, 4), (4, 1, 1, 4), (5, 0, 0, 4)] {
        refuse(&of(&pickle(shape, stride, offset, storage)), &["does not lie in its storage of 4"]);
    }
    refuse(&of(&pickle(4, 1, 0, 9)), &["tensor w", "9 elements has 16 bytes"]);
    refuse(&archive(&[("x/data.pkl", &pickle(4, 1, 0, 4))], 0), &["tensor w", "no record data/0"]);
    refuse(&archive(&[("x/data.pkl", &pickle(4, 1, 0, 4)), ("x/byteorder", b"big")], 0), &["big-endian"]);
    refuse(&archive(&[("x/other", b"")], 0), &["no data.pkl"]);
    refuse(&archive(&[("x/data.pkl", b""), ("x/data.pkl", b"")], 0), &["there twice"]);
    // What would be unpacked could be of any size.
    refuse(&archive(&[("x/data.pkl", b"")], 8), &["x/data.pkl", "compressed (method 8)"]);
    refuse(b"PK\x05\x06", &["ends too soon"]);
    refuse(&[b"PK".as_slice(), &[0; 99]].concat(), &["end is not there"]);
    let mut long = valid_pytorch();
    let at = long.len() - 10;
    long[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    refuse(&long, &["list of records", "not within the file"]);
    assert_little_memory();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn random_bytes_over_a_file_of_torch_are_survived(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/pytorch/mixed.bin");
        let mut bytes = std::fs::read(golden).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = read_pytorch(&Scratch::new("pytorch_model.bin"), &bytes);
    }
}
