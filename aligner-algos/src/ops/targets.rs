//! Values on a sample's targets, apart from those on its other tokens.

use aligner_core::{Error, Group, Result, Sample};

/// Places of the targets among the sample's tokens, ascending: where the mask is set, but for the first
/// token, which nothing predicts.
pub fn places(sample: &Sample) -> impl Iterator<Item = usize> {
    (1..sample.tokens.len()).filter(|&at| sample.mask.get(at) == Some(&true))
}

/// A per-token field's values on the targets: `[tokens]` to `[targets]`. Where the field has no value it is 0.
pub fn gather(sample: &Sample, field: &[f32]) -> Vec<f32> {
    places(sample).map(|at| field.get(at).copied().unwrap_or(0.0)).collect()
}

/// One value on each target and 0 elsewhere: `[targets]` to `[tokens]`.
pub fn scatter(sample: &Sample, values: &[f32]) -> Vec<f32> {
    let mut all = vec![0.0; sample.tokens.len()];
    places(sample).zip(values).for_each(|(at, value)| all[at] = *value);
    all
}

/// [`gather`] for a field that has to be there.
///
/// # Errors
/// [`Error::Invalid`] names the group, the sample and the field, and says with `source` what fills it.
pub(crate) fn gather_known(
    group: &Group,
    at: usize,
    (field, source): (&str, &str),
    values: &[f32],
) -> Result<Vec<f32>> {
    let sample = &group.samples[at];
    if values.len() != sample.tokens.len() {
        return Err(Error::Invalid(format!(
            "group {}, sample {at}: `{field}` has {} entries for {} tokens; {source}",
            group.id,
            values.len(),
            sample.tokens.len()
        )));
    }
    Ok(gather(sample, values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_to_the_targets_and_back() {
        let sample = Sample::new(vec![7; 5], vec![true, false, true, false, true]);
        assert_eq!(places(&sample).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(scatter(&sample, &[1.0, 2.0]), [0.0, 0.0, 1.0, 0.0, 2.0]);
        assert_eq!(gather(&sample, &[9.0, 9.0, 1.0, 9.0, 2.0]), [1.0, 2.0]);
    }

    #[test]
    fn a_missing_field_is_named_with_its_source() {
        let group = Group::single("row 3", Sample::response(&[1], &[2, 3]));
        let missing = gather_known(&group, 0, ("values", "a critic gives them"), &[]);
        let message = missing.expect_err("no values").to_string();
        for part in ["row 3", "sample 0", "`values`", "3 tokens", "a critic"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
