//! A name for the content of a set of weights.

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::ParamSet;
use crate::ops::host::with_slice;

/// Elements hashed as one piece: fixed, so that the result does not depend on the machine.
const PIECE_ELEMENTS: usize = 1 << 18;

/// A hash of names, shapes and the bits of all elements: 64 hexadecimal digits.
///
/// Equal weights have equal sums on every machine and with any number of threads. Pieces of fixed
/// size are hashed in parallel and their hashes hashed in order.
pub fn checksum(params: &ParamSet) -> String {
    let mut whole = Sha256::new();
    for param in params.iter() {
        whole.update((param.name.len() as u64).to_le_bytes());
        whole.update(&param.name);
        whole.update((param.shape.len() as u64).to_le_bytes());
        for &dim in &param.shape {
            whole.update((dim as u64).to_le_bytes());
        }
        let hash = |values: &[f32]| values.par_chunks(PIECE_ELEMENTS).map(hash_piece).collect::<Vec<_>>();
        if let Some(packed) = &param.packed {
            // What the products read, a few rows at a time.
            let [outputs, inputs] = packed.shape();
            let step = (PIECE_ELEMENTS / inputs.max(1)).max(1);
            let hash = |first: usize| {
                let rows = first..outputs.min(first + step);
                let mut values = vec![0.0; rows.len() * inputs];
                packed.view().unpack(rows, 0..inputs, &mut values);
                hash_piece(&values)
            };
            whole.update(format!("{:?}", packed.kind()));
            let pieces: Vec<_> =
                (0..outputs.div_ceil(step)).into_par_iter().map(|at| hash(at * step)).collect();
            for piece in pieces {
                whole.update(piece);
            }
        }
        for piece in with_slice(&param.value, hash) {
            whole.update(piece);
        }
    }
    format!("{:x}", whole.finalize())
}

fn hash_piece(values: &[f32]) -> [u8; 32] {
    // Little-endian bytes, so that the sum is the same on every machine.
    if cfg!(target_endian = "little") {
        return Sha256::digest(bytemuck::cast_slice::<f32, u8>(values)).into();
    }
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    fn params(entries: &[(&str, &[usize], Vec<f32>)]) -> ParamSet {
        let mut set = ParamSet::default();
        for (name, shape, values) in entries {
            set.insert_data(*name, shape, values.clone(), &Device::flex()).unwrap();
        }
        set
    }

    #[test]
    fn sum_sees_names_shapes_order_and_every_bit() {
        let base = checksum(&params(&[("a", &[2, 3], vec![0.5; 6]), ("b", &[1], vec![1.0])]));
        assert_eq!(base, checksum(&params(&[("a", &[2, 3], vec![0.5; 6]), ("b", &[1], vec![1.0])])));
        assert_eq!(base.len(), 64);
        let last_bit = f32::from_bits(1.0f32.to_bits() + 1);
        let others = [
            params(&[("c", &[2, 3], vec![0.5; 6]), ("b", &[1], vec![1.0])]),
            params(&[("a", &[3, 2], vec![0.5; 6]), ("b", &[1], vec![1.0])]),
            params(&[("b", &[1], vec![1.0]), ("a", &[2, 3], vec![0.5; 6])]),
            params(&[("a", &[2, 3], vec![0.5; 6]), ("b", &[1], vec![last_bit])]),
        ];
        for other in others {
            assert_ne!(base, checksum(&other));
        }
    }

    #[test]
    fn sum_does_not_depend_on_the_number_of_threads() {
        let values: Vec<f32> = (0..3 * PIECE_ELEMENTS + 5).map(|at| at as f32).collect();
        let set = params(&[("a", &[values.len()], values.clone())]);
        let sum_with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| checksum(&set))
        };
        assert_eq!(sum_with(1), sum_with(4));
    }
}
