//! A tensor in a storage: where its elements lie, and in which order.

use super::super::encoding::Encoding;

/// The element types of torch that a checkpoint may have. Of those that are no numbers here, the size is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Number(Encoding),
    /// Of so many bytes, by torch's name.
    Other(&'static str, usize),
}

impl Element {
    /// Of a class of storages, without `Storage`.
    pub(super) fn of_storage(class: &str) -> Option<Self> {
        Some(match class {
            "Float" => Self::Number(Encoding::F32),
            "Double" => Self::Number(Encoding::F64),
            "Half" => Self::Number(Encoding::F16),
            "BFloat16" => Self::Number(Encoding::BF16),
            "Long" => Self::Other("int64", 8),
            "Int" => Self::Other("int32", 4),
            "Short" => Self::Other("int16", 2),
            "Char" => Self::Other("int8", 1),
            "Byte" => Self::Other("uint8", 1),
            "Bool" => Self::Other("bool", 1),
            _ => return None,
        })
    }

    /// Of `torch.<name>`.
    pub(super) fn of_dtype(name: &str) -> Option<Self> {
        Some(match name {
            "float8_e4m3fn" => Self::Number(Encoding::F8_E4M3),
            "float8_e5m2" => Self::Number(Encoding::F8_E5M2),
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Number(encoding) => encoding.block_bytes(),
            Self::Other(_, bytes) => bytes,
        }
    }
}

/// A tensor as a pickle describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strided {
    /// The storage's record.
    pub(super) key: String,
    pub(super) element: Element,
    /// Elements of the storage.
    pub(super) len: u64,
    /// The first element's place in the storage.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    /// Elements from one to the next along each axis.
    pub(super) strides: Vec<usize>,
}

impl Strided {
    /// How many elements there are.
    pub(super) fn elements(&self) -> usize {
        // Checked to be no more than the storage's.
        self.shape.iter().product()
    }

    /// Elements of the storage from the first to the last that it has.
    pub(super) fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        1 + self.shape.iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>()
    }

    /// Refuses what does not lie within the storage, and what repeats elements: a small file could stand for
    /// any amount of memory.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { shape, strides, offset, len, .. } = self;
        let wrong = || {
            format!(
                "a tensor of shape {shape:?}, strides {strides:?} and offset {offset} does not lie in its storage of {len} elements"
            )
        };
        if shape.len() != strides.len() || shape.len() > 16 {
            return Err(wrong());
        }
        let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let reach = shape.iter().zip(strides).try_fold(*offset, |reach, (&size, &stride)| {
            reach.checked_add(size.saturating_sub(1).checked_mul(stride)?)
        });
        let fits = match (elements, reach) {
            (Some(0), Some(_)) => true,
            (Some(elements), Some(reach)) => elements as u64 <= *len && (reach as u64) < *len,
            _ => false,
        };
        if fits { Ok(()) } else { Err(wrong()) }
    }

    /// Brings the elements of [`Strided::span`] into row-major order.
    pub(super) fn gathered(&self, span: Vec<f32>) -> Vec<f32> {
        let dense = self.shape.iter().zip(&self.strides).rev().try_fold(1, |expected, (&size, &stride)| {
            (size == 1 || stride == expected).then_some(expected * size)
        });
        if dense.is_some() || span.is_empty() {
            return span;
        }
        let mut out = Vec::with_capacity(self.elements());
        let mut index = vec![0; self.shape.len()];
        for _ in 0..self.elements() {
            let at: usize = index.iter().zip(&self.strides).map(|(index, stride)| index * stride).sum();
            out.push(span[at]);
            for (index, &size) in index.iter_mut().zip(&self.shape).rev() {
                *index += 1;
                if *index < size {
                    break;
                }
                *index = 0;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(shape: &[usize], strides: &[usize], offset: usize, len: u64) -> Strided {
        let element = Element::Number(Encoding::F32);
        Strided { key: "0".into(), element, len, offset, shape: shape.to_vec(), strides: strides.to_vec() }
    }

    #[test]
    fn a_transposed_view_is_gathered_row_by_row() {
        let view = strided(&[2, 3], &[1, 2], 1, 7);
        view.check().unwrap();
        assert_eq!(view.span(), 6);
        let span = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(view.gathered(span.clone()), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
        assert_eq!(strided(&[2, 3], &[3, 1], 0, 6).gathered(span.clone()), span);
        // Every second column of rows of four.
        let view = strided(&[2, 2], &[4, 2], 0, 7);
        assert_eq!(view.gathered((0..7).map(|value| value as f32).collect()), [0.0, 2.0, 4.0, 6.0]);
        assert_eq!(strided(&[0, 5], &[5, 1], 0, 0).gathered(Vec::new()), [] as [f32; 0]);
    }

    #[test]
    fn what_reaches_out_of_its_storage_or_repeats_it_is_refused() {
        assert!(strided(&[2, 3], &[3, 1], 0, 5).check().is_err());
        assert!(strided(&[2, 3], &[3, 1], 1, 6).check().is_err());
        assert!(strided(&[1 << 40], &[0], 0, 1).check().unwrap_err().contains("does not lie"));
        assert!(strided(&[usize::MAX, 2], &[0, 0], 0, 1).check().is_err());
        assert!(strided(&[2], &[usize::MAX], 0, 9).check().is_err());
        assert!(strided(&[2], &[1, 1], 0, 9).check().is_err());
        strided(&[0, 5], &[5, 1], 0, 0).check().unwrap();
    }
}
