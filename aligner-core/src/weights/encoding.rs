//! How a file stores elements, and their decoding to `f32`.

mod eight_bits;
mod k_quants;
mod legacy;
mod plain;

pub(crate) use legacy::encode_q8_0;

/// A stored element type: plain numbers, or blocks of quantised ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names that the formats' documentations give them")]
pub(crate) enum Encoding {
    F32,
    F64,
    F16,
    BF16,
    /// Four bits of exponent, three of mantissa, no infinity.
    F8_E4M3,
    /// Five bits of exponent, two of mantissa.
    F8_E5M2,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Encoding {
    /// Elements of one block; 1 for plain numbers.
    pub(crate) fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F64 | Self::F16 | Self::BF16 | Self::F8_E4M3 | Self::F8_E5M2 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            Self::F8_E4M3 | Self::F8_E5M2 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of `elements`; none where they are not whole blocks or the size overflows.
    pub(crate) fn bytes(self, elements: usize) -> Option<usize> {
        let blocks =
            elements.is_multiple_of(self.block_elements()).then(|| elements / self.block_elements())?;
        blocks.checked_mul(self.block_bytes())
    }

    /// Decodes whole blocks; `bytes` is [`Encoding::bytes`] of `out`'s length.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        debug_assert_eq!(self.bytes(out.len()), Some(bytes.len()));
        match self {
            Self::F32 => plain::decode_f32(bytes, out),
            Self::F64 => plain::decode_f64(bytes, out),
            Self::F16 => plain::decode_f16(bytes, out),
            Self::BF16 => plain::decode_bf16(bytes, out),
            Self::F8_E4M3 => eight_bits::decode_e4m3(bytes, out),
            Self::F8_E5M2 => eight_bits::decode_e5m2(bytes, out),
            Self::Q4_0 => each_block(bytes, out, legacy::decode_q4_0),
            Self::Q4_1 => each_block(bytes, out, legacy::decode_q4_1),
            Self::Q5_0 => each_block(bytes, out, legacy::decode_q5_0),
            Self::Q5_1 => each_block(bytes, out, legacy::decode_q5_1),
            Self::Q8_0 => each_block(bytes, out, legacy::decode_q8_0),
            Self::Q2_K => each_block(bytes, out, k_quants::decode_q2_k),
            Self::Q3_K => each_block(bytes, out, k_quants::decode_q3_k),
            Self::Q4_K => each_block(bytes, out, k_quants::decode_q4_k),
            Self::Q5_K => each_block(bytes, out, k_quants::decode_q5_k),
            Self::Q6_K => each_block(bytes, out, k_quants::decode_q6_k),
        }
    }
}

/// Runs a decoder over blocks of `B` bytes and `N` elements.
fn each_block<const B: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: fn(&[u8; B], &mut [f32; N]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

/// The half-precision number at `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [(&str, Encoding); 10] = [
        ("Q4_0", Encoding::Q4_0),
        ("Q4_1", Encoding::Q4_1),
        ("Q5_0", Encoding::Q5_0),
        ("Q5_1", Encoding::Q5_1),
        ("Q8_0", Encoding::Q8_0),
        ("Q4_K", Encoding::Q4_K),
        ("Q5_K", Encoding::Q5_K),
        ("Q6_K", Encoding::Q6_K),
        ("Q2_K", Encoding::Q2_K),
        ("Q3_K", Encoding::Q3_K),
    ];

    fn from_hex(text: &str) -> Vec<u8> {
        let digits = text.as_bytes().as_chunks::<2>().0;
        digits.iter().map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
    }

    /// Every type, bit for bit as the `gguf` package dequantises it.
    #[test]
    fn blocks_decode_to_the_golden_bits() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf/blocks.json");
        let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let cases = cases.as_array().unwrap();
        assert_eq!(cases.len(), KINDS.len());
        for (case, (name, encoding)) in cases.iter().zip(KINDS) {
            assert_eq!(case["type"], name);
            let bytes = from_hex(case["bytes"].as_str().unwrap());
            let mut out = vec![0.0; 2 * encoding.block_elements()];
            encoding.decode(&bytes, &mut out);
            let bits: Vec<u8> = out.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(bits, from_hex(case["f32"].as_str().unwrap()), "{name}");
        }
    }

    /// Bit for bit as the `gguf` package quantises.
    #[test]
    fn blocks_of_signed_bytes_are_encoded_to_the_golden_bits() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf/families/q8_0.json");
        let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let bytes = |key: &str| from_hex(golden[key].as_str().unwrap());
        let values: Vec<f32> =
            bytes("f32").as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let (rows, rest) = values.as_chunks::<32>();
        assert_eq!((rows.len(), rest.len()), (24, 0));
        for (at, (row, expected)) in rows.iter().zip(bytes("q8_0").as_chunks::<34>().0).enumerate() {
            assert_eq!(&encode_q8_0(row), expected, "row {at}");
        }
    }

    #[test]
    fn sizes_refuse_broken_blocks_and_overflow() {
        assert_eq!(Encoding::Q4_1.bytes(64), Some(40));
        assert_eq!(Encoding::Q6_K.bytes(255), None);
        assert_eq!(Encoding::F64.bytes(usize::MAX), None);
    }

    fn decoded(encoding: Encoding, bytes: &[u8]) -> Vec<u32> {
        let mut out = vec![0.0; bytes.len() / encoding.block_bytes()];
        encoding.decode(bytes, &mut out);
        bits(&out)
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn half_precision_is_exact_also_below_the_normal_range() {
        let values = decoded(Encoding::F16, &[0x01, 0x00, 0x00, 0xBC, 0xFF, 0x7B]);
        assert_eq!(values, bits(&[2.0f32.powi(-24), -1.0, 65504.0]));
        let values = decoded(Encoding::BF16, &[0x80, 0x3F, 0x01, 0x00, 0x00, 0xC0]);
        assert_eq!(values, bits(&[1.0, f32::from_bits(0x0001_0000), -2.0]));
    }

    #[test]
    fn double_precision_rounds_to_the_nearest() {
        assert_eq!(decoded(Encoding::F64, &0.1f64.to_le_bytes()), bits(&[0.1]));
    }
}
