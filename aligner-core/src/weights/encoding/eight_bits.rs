//! Floating point in eight bits (Micikevicius et al. 2022, arXiv:2209.05433).

use half::f16;

/// `S.EEEE.MMM`: the exponent's bias is 7; all ones is NaN, and there is no infinity.
pub(super) fn decode_e4m3(bytes: &[u8], out: &mut [f32]) {
    for (&byte, out) in bytes.iter().zip(out) {
        let sign = u32::from(byte & 0x80) << 24;
        let magnitude = u32::from(byte & 0x7F);
        // In the places of a single, whose bias is 127, the number is 2^120 times too small; a subnormal one too.
        let value = f32::from_bits(sign | magnitude << 20) * f32::from_bits((120 + 127) << 23);
        *out = if magnitude == 0x7F { f32::NAN.copysign(value) } else { value };
    }
}

/// `S.EEEEE.MM`: the upper half of a half.
pub(super) fn decode_e5m2(bytes: &[u8], out: &mut [f32]) {
    for (&byte, out) in bytes.iter().zip(out) {
        *out = f16::from_bits(u16::from(byte) << 8).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number of eight bits by its definition.
    fn defined(byte: u8, exponent_bits: u32, bias: i32, infinite: bool) -> f64 {
        let mantissa_bits = 7 - exponent_bits;
        let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(byte & 0x7F) >> mantissa_bits;
        let mantissa = f64::from(byte & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let top = (1 << exponent_bits) - 1;
        match exponent {
            0 => sign * mantissa * 2f64.powi(1 - bias),
            exponent if infinite && exponent == top => {
                if mantissa == 0.0 {
                    sign * f64::INFINITY
                } else {
                    f64::NAN
                }
            }
            _ if !infinite && byte & 0x7F == 0x7F => f64::NAN,
            exponent => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    }

    #[test]
    fn all_numbers_are_those_of_the_definition() {
        let bytes: Vec<u8> = (0..=255).collect();
        let mut out = [0.0; 256];
        for (decode, bits, bias, infinite) in
            [(decode_e4m3 as fn(&[u8], &mut [f32]), 4, 7, false), (decode_e5m2, 5, 15, true)]
        {
            decode(&bytes, &mut out);
            for (&byte, &got) in bytes.iter().zip(&out) {
                let expected = defined(byte, bits, bias, infinite) as f32;
                let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                assert!(same, "{byte:#04x}: {got}, expected {expected}");
            }
        }
    }
}
