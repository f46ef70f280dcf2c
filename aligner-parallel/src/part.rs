//! Elements on their way between ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aligner_core::ops::host::HostTensor;
use bytemuck::Pod;

/// A range of elements that several ranks may hold at once, aligned for their type.
#[derive(Clone)]
pub struct Part {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    /// In bytes.
    range: Range<usize>,
}

/// What a rank brings to a meeting.
#[derive(Debug, Clone)]
pub enum Parts {
    /// The same for every rank.
    Same(Part),
    /// The r-th for rank r.
    Each(Vec<Part>),
}

impl Parts {
    /// What is for the rank at this place.
    pub(crate) fn for_place(&self, place: usize) -> Part {
        match self {
            Self::Same(part) => part.clone(),
            Self::Each(parts) => parts[place].clone(),
        }
    }
}

struct Owned<E>(Vec<E>);

impl<E: Pod> AsRef<[u8]> for Owned<E> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

struct OfTensor(HostTensor);

impl AsRef<[u8]> for OfTensor {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self.0.as_slice())
    }
}

impl Part {
    fn whole(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let range = 0..owner.as_ref().len();
        Self { owner: Arc::new(owner), range }
    }

    /// No elements.
    pub(crate) fn empty() -> Self {
        Self::new(Vec::<u64>::new())
    }

    /// These elements.
    pub(crate) fn new<E: Pod + Send + Sync>(elements: Vec<E>) -> Self {
        Self::whole(Owned(elements))
    }

    /// A tensor's elements, which are not copied where they lie in host memory.
    pub(crate) fn of_tensor(tensor: HostTensor) -> Self {
        Self::whole(OfTensor(tensor))
    }

    /// Elements `range` of these, which are of `size` bytes each.
    pub(crate) fn slice(&self, range: Range<usize>, size: usize) -> Self {
        let (start, end) = (self.range.start + range.start * size, self.range.start + range.end * size);
        assert!(end <= self.range.end, "a slice past the end of its part");
        Self { owner: self.owner.clone(), range: start..end }
    }

    /// The elements, which are of the type that the part was made of.
    pub(crate) fn elements<E: Pod>(&self) -> &[E] {
        bytemuck::cast_slice(self.bytes())
    }

    /// The elements' bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_slices_count_in_elements() {
        let part = Part::new(vec![0.0f32, 1.0, 2.0, 3.0, 4.0]);
        let inner = part.slice(1..4, 4).slice(1..3, 4);
        assert_eq!(inner.elements::<f32>(), [2.0, 3.0]);
        assert_eq!((inner.bytes().len(), Part::empty().bytes().len()), (8, 0));
    }
}
