//! Held-out rows, order and resuming.

use std::collections::BTreeSet;
use std::fmt::Write;

use aligner_data::{Dataset, DatasetConfig, Loader, LoaderState, Overlong};
use proptest::prelude::*;

use crate::scene::tokenizer;

/// A data set of `rows` numbered rows, with an overlong row at each multiple of `long_every`.
fn numbered(
    rows: usize,
    long_every: usize,
    config: impl FnOnce(&mut DatasetConfig),
) -> (tempfile::TempDir, Dataset) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let mut text = String::new();
    for row in 1..=rows {
        let long = if long_every > 0 && row % long_every == 0 { "x ".repeat(200) } else { String::new() };
        writeln!(text, r#"{{"text": "row {row} {long}"}}"#).unwrap();
    }
    std::fs::write(&path, text).unwrap();
    let mut settings = DatasetConfig { max_length: 64, overlong: Overlong::Drop, ..DatasetConfig::new(path) };
    config(&mut settings);
    let dataset = Dataset::open(&settings, &tokenizer()).unwrap();
    (dir, dataset)
}

fn ids(groups: &[aligner_core::Group]) -> Vec<String> {
    groups.iter().map(|group| group.id.clone()).collect()
}

#[test]
fn each_epoch_has_every_row_once_in_an_order_of_its_own() {
    let (_dir, dataset) = numbered(20, 0, |_| {});
    let mut loader = Loader::new(dataset, 1, true).unwrap();
    let first = ids(&loader.next(20).unwrap());
    assert_eq!(loader.epoch(), 1);
    let second = ids(&loader.next(20).unwrap());
    let distinct: BTreeSet<_> = first.iter().collect();
    assert_eq!(distinct.len(), 20);
    assert_eq!(distinct, second.iter().collect());
    assert_ne!(first, second);
}

#[test]
fn without_shuffling_rows_come_in_file_order_and_batches_cross_epochs() {
    let (_dir, dataset) = numbered(3, 0, |_| {});
    let mut loader = Loader::new(dataset, 1, false).unwrap();
    let got = ids(&loader.next(5).unwrap());
    assert_eq!(got, [1, 2, 3, 1, 2].map(|row| format!("rows.jsonl:{row}")));
    assert!((loader.progress() - 5.0 / 3.0).abs() < 1e-9);
}

#[test]
fn dropped_rows_are_passed_over_and_a_set_of_them_is_an_error() {
    let (_dir, dataset) = numbered(9, 3, |_| {});
    let mut loader = Loader::new(dataset, 1, true).unwrap();
    assert_eq!(loader.next(6).unwrap().len(), 6);
    let (_dir, dataset) = numbered(4, 1, |_| {});
    let message = Loader::new(dataset, 1, true).unwrap().next(1).unwrap_err().to_string();
    assert!(message.contains("all 4 rows are dropped"), "{message}");
}

#[test]
fn one_good_row_is_found_wherever_two_epochs_put_it() {
    // Row 1 is good, row 2 too long.
    let (_dir, dataset) = numbered(2, 2, |_| {});
    for seed in 0..20 {
        assert_eq!(Loader::new(dataset.clone(), seed, true).unwrap().next(10).unwrap().len(), 10);
    }
}

#[test]
fn a_state_of_other_data_is_refused() {
    let (_dir, dataset) = numbered(10, 0, |_| {});
    let mut loader = Loader::new(dataset, 1, true).unwrap();
    loader.next(3).unwrap();
    let state = loader.state();
    let (_other, fewer) = numbered(9, 0, |_| {});
    let message = Loader::new(fewer, 1, true).unwrap().restore(&state).unwrap_err().to_string();
    assert!(message.contains("had 10 rows") && message.contains("has 9"), "{message}");
    let moved = LoaderState { next_id: "rows.jsonl:99".into(), ..state };
    let message = loader.restore(&moved).unwrap_err().to_string();
    assert!(message.contains("rows.jsonl:99"), "{message}");
}

#[test]
fn held_out_rows_are_disjoint_from_the_rest_and_do_not_move_with_the_seed_of_the_run() {
    let split = |seed: u64| {
        let (_dir, dataset) = numbered(30, 0, |config| (config.holdout, config.holdout_seed) = (10, seed));
        let (train, held_out) = dataset.split().unwrap();
        let ids = |part: &Dataset| (0..part.len()).map(|row| part.id(row)).collect::<BTreeSet<_>>();
        (ids(&train), ids(&held_out))
    };
    let (train, held_out) = split(0);
    assert_eq!((train.len(), held_out.len()), (20, 10));
    assert!(train.is_disjoint(&held_out));
    assert_eq!(split(0), (train, held_out.clone()));
    assert_ne!(split(1).1, held_out);
}

#[test]
fn a_holdout_of_all_rows_is_refused() {
    let (_dir, dataset) = numbered(5, 0, |config| config.holdout = 5);
    let message = dataset.split().unwrap_err().to_string();
    assert!(message.starts_with("holdout: 5 of 5 rows"), "{message}");
    let (_dir, dataset) = numbered(5, 0, |_| {});
    let (train, held_out) = dataset.split().unwrap();
    assert_eq!((train.len(), held_out.len()), (5, 0));
    assert!(Loader::new(held_out, 0, true).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// A loader that is restored from a state, written and read as JSON, goes on as the first would.
    #[test]
    fn resuming_is_exact(
        rows in 1_usize..12, long_every in 2_usize..5, seed in any::<u64>(), shuffle in any::<bool>(),
        before in 0_usize..30, after in 1_usize..20,
    ) {
        let (_dir, dataset) = numbered(rows, long_every, |_| {});
        let mut first = Loader::new(dataset.clone(), seed, shuffle).unwrap();
        first.next(before).unwrap();
        let state: LoaderState = serde_json::from_str(&serde_json::to_string(&first.state()).unwrap()).unwrap();
        let expected = first.next(after).unwrap();
        let mut second = Loader::new(dataset, 0, false).unwrap();
        second.restore(&state).unwrap();
        prop_assert_eq!(second.next(after).unwrap(), expected);
        prop_assert_eq!(second.state(), first.state());
    }
}
