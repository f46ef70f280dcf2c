//! Distributions and draws of random settings on random logits.

use super::*;

/// Settings of which each is on in about a third of the cases.
fn random_sampling(rng: Rng, vocab: usize) -> Sampling {
    let on = |n: u64| rng.below(n, 3) == 0;
    let range = |n: u64, from: f64, to: f64| (from + (to - from) * rng.uniform(n)) as f32;
    let token = |n: u64| rng.below(n, vocab as u64) as u32;
    let mut sampling = Sampling { temperature: range(1, 0.2, 2.0), ..Sampling::default() };
    if on(2) {
        sampling.repetition_penalty = range(3, 0.5, 2.0);
    }
    if on(4) {
        sampling.presence_penalty = range(5, -1.0, 1.0);
    }
    if on(6) {
        sampling.frequency_penalty = range(7, -1.0, 1.0);
    }
    if on(8) {
        sampling.logit_bias = (0..3).map(|i| (token(9 + i), range(12 + i, -3.0, 3.0))).collect();
    }
    if on(15) {
        let allowed: TokenMask =
            (0..vocab as u32).filter(|&t| rng.below(1000 + u64::from(t), 2) == 0).collect();
        sampling.allowed = Some(Arc::new(allowed));
    }
    if on(16) {
        (sampling.min_tokens, sampling.stop_tokens) = (rng.below(17, 8) as usize, vec![token(18), token(19)]);
    }
    if on(20) {
        sampling.top_k = 1 + rng.below(21, vocab as u64 / 2) as usize;
    }
    if on(22) {
        sampling.top_p = range(23, 0.02, 0.999);
    }
    if on(24) {
        sampling.min_p = range(25, 0.0001, 0.5);
    }
    if on(26) {
        sampling.typical_p = range(27, 0.02, 0.99);
    }
    sampling
}

#[test]
fn random_settings_give_the_distribution_of_the_plain_reference() {
    let (mut sampler, mut got) = (Sampler::new(), Distribution::default());
    let (mut compared, cases) = (0, 3000);
    for case in 0..cases {
        let rng = Rng::new(&[11, case]);
        let vocab = [3, 20, 128, 129, 300, 1000][rng.below(100, 6) as usize];
        let steps = [1.0, 8.0, 1e6][rng.below(101, 3) as usize];
        let logits = random_logits(Rng::new(&[12, case]), vocab, 0.5 + 3.0 * rng.uniform(102), steps);
        let sampling = random_sampling(rng, vocab);
        let tokens = |from: u64, n: u64| -> Vec<u32> {
            (from..from + n).map(|i| rng.below(i, vocab as u64) as u32).collect()
        };
        let (prompt, response) = (tokens(200, 6), tokens(300, 5));
        let mut seen = Seen::new(&prompt, &sampling);
        for &token in &response {
            seen.push(token);
            seen.push(2);
            seen.pop(2);
        }
        let logits64 = adjusted(&logits, &sampling, &prompt, &response);
        let result = sampler.distribution(&row(&logits, &sampling, &seen), &mut got);
        if logits64.iter().all(|logit| *logit == f64::NEG_INFINITY) {
            assert!(result.unwrap_err().to_string().contains("row 7"));
            continue;
        }
        result.unwrap();
        let context = format!("case {case}: {sampling:?}");
        compared += u64::from(compare(&got, &Reference::new(&logits64, &sampling), 2e-5, &context));
    }
    assert!(compared > cases * 8 / 10, "{compared} of {cases} were far enough from a border");
}

#[test]
fn single_truncations_on_a_large_vocabulary_match_the_reference() {
    let (mut sampler, mut got) = (Sampler::new(), Distribution::default());
    let base = Sampling::default;
    let settings = [
        Sampling { top_k: 50, ..base() },
        Sampling { top_k: 3000, ..base() },
        Sampling { top_p: 0.9, ..base() },
        Sampling { top_p: 0.999, temperature: 1.5, ..base() },
        Sampling { min_p: 0.05, ..base() },
        Sampling { typical_p: 0.6, ..base() },
        Sampling { top_k: 500, top_p: 0.9, min_p: 0.01, typical_p: 0.9, ..base() },
        Sampling { temperature: 0.7, ..base() },
    ];
    let mut compared = 0;
    for (case, sampling) in settings.iter().enumerate() {
        for spread in [0.1, 1.0, 4.0] {
            let logits = random_logits(Rng::new(&[13, case as u64]), 20_000, spread, 1e6);
            let seen = Seen::new(&[], sampling);
            sampler.distribution(&row(&logits, sampling, &seen), &mut got).unwrap();
            let logits64: Vec<f64> = logits.iter().copied().map(f64::from).collect();
            let context = format!("spread {spread}: {sampling:?}");
            compared += usize::from(compare(&got, &Reference::new(&logits64, sampling), 3e-7, &context));
        }
    }
    assert!(compared >= 16, "{compared}");
}

#[test]
fn frequencies_of_draws_follow_the_distribution() {
    let logits = random_logits(Rng::new(&[14]), 300, 1.5, 1e6);
    let base = Sampling::default;
    let settings = [
        base(),
        Sampling { temperature: 0.5, ..base() },
        Sampling { top_k: 7, ..base() },
        Sampling { top_p: 0.5, typical_p: 0.8, ..base() },
    ];
    for (case, sampling) in settings.iter().enumerate() {
        let mut sampler = Sampler::new();
        let (rng, draws) = (Rng::new(&[15, case as u64]), 60_000);
        let mut seen = Seen::new(&[], sampling);
        let mut counts = vec![0; logits.len()];
        let mut from = Distribution::default();
        sampler.distribution(&row(&logits, sampling, &seen), &mut from).unwrap();
        for counter in 0..draws {
            let token = from.draw(rng.uniform(counter));
            if counter < 100 {
                let drawn = sampler.sample(&row(&logits, sampling, &seen), rng).unwrap();
                assert_eq!(drawn.token, token, "sample draws with the token's index");
                seen.push(token);
            }
            counts[token as usize] += 1;
        }
        let logits64: Vec<f64> = logits.iter().copied().map(f64::from).collect();
        let reference = Reference::new(&logits64, sampling);
        check_frequencies(&counts, &reference.probabilities, &format!("{sampling:?}"));
    }
}

#[test]
fn the_ends_of_the_uniform_draw_tokens_with_a_probability() {
    let mut logits = vec![f32::NEG_INFINITY; 1000];
    (logits[3], logits[700]) = (0.0, 1.0);
    for sampling in [Sampling::default(), Sampling { top_p: 0.99, ..Sampling::default() }] {
        let seen = Seen::new(&[], &sampling);
        let mut from = Distribution::default();
        Sampler::new().distribution(&row(&logits, &sampling, &seen), &mut from).unwrap();
        assert_eq!((from.draw(0.0), from.draw(1.0 - f64::EPSILON)), (3, 700));
        assert!(from.logp(4).is_infinite() && from.probability(1 << 30).abs() == 0.0);
    }
}

#[test]
fn greedy_takes_the_first_of_equals_and_reports_the_adjusted_model() {
    let logits = [0.0f32, 2.0, 2.0, 3.0];
    let greedy = Sampling { temperature: 0.0, top_logprobs: 3, ..Sampling::default() };
    let mut seen = Seen::new(&[], &greedy);
    let mut sampler = Sampler::new();
    let drawn = sampler.sample(&row(&logits, &greedy, &seen), Rng::new(&[0])).unwrap();
    let raw =
        |at: usize| f64::from(logits[at]) - logits.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
    assert_eq!(drawn.token, 3);
    assert!((f64::from(drawn.logp) - raw(3)).abs() < 1e-6 && (drawn.logp - drawn.raw_logp).abs() < 1e-6);
    assert_eq!(drawn.top.iter().map(|top| top.0).collect::<Vec<_>>(), [3, 1, 2]);
    assert!(drawn.top.iter().all(|&(token, logp)| (f64::from(logp) - raw(token as usize)).abs() < 1e-6));

    let barred = Sampling { min_tokens: 1, stop_tokens: vec![3], ..greedy };
    let drawn = sampler.sample(&row(&logits, &barred, &seen), Rng::new(&[0])).unwrap();
    assert_eq!(drawn.token, 1);
    let expected = (2f64.exp() / (1.0 + 2.0 * 2f64.exp())).ln();
    assert!((f64::from(drawn.logp) - expected).abs() < 1e-6);
    assert!((f64::from(drawn.raw_logp) - raw(1)).abs() < 1e-6);
    seen.push(1);
    assert_eq!(sampler.sample(&row(&logits, &barred, &seen), Rng::new(&[0])).unwrap().token, 3);
}

#[test]
fn log_probabilities_are_those_of_both_distributions() {
    let logits = random_logits(Rng::new(&[16]), 500, 2.0, 1e6);
    let sampling = Sampling { temperature: 0.7, top_k: 20, top_logprobs: 5, ..Sampling::default() };
    let seen = Seen::new(&[], &sampling);
    let drawn = Sampler::new().sample(&row(&logits, &sampling, &seen), Rng::new(&[1])).unwrap();
    let logits64: Vec<f64> = logits.iter().copied().map(f64::from).collect();
    let (token, raw) = (drawn.token as usize, softmax(&logits64));
    let expected = Reference::new(&logits64, &sampling).probabilities[token].ln();
    assert!((f64::from(drawn.logp) - expected).abs() < 2e-6);
    assert!((f64::from(drawn.raw_logp) - raw[token].ln()).abs() < 2e-6);
    let likeliest: Vec<u32> = sorted(&raw, |i| -logits64[i]).iter().take(5).map(|&i| i as u32).collect();
    assert_eq!(drawn.top.iter().map(|top| top.0).collect::<Vec<_>>(), likeliest);
}

#[test]
fn logits_that_cannot_be_drawn_from_name_the_request() {
    let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
    let seen = Seen::new(&[], &sampling);
    let bad: [&[f32]; 4] = [&[0.0, f32::NAN], &[f32::INFINITY, 0.0], &[f32::NEG_INFINITY; 2], &[]];
    for logits in bad {
        let error = Sampler::new().sample(&row(logits, &sampling, &seen), Rng::new(&[0])).unwrap_err();
        assert!(matches!(&error, Error::NotFinite { samples, .. } if samples == &["row 7"]), "{error}");
    }
    let nothing = Sampling { min_tokens: 1, stop_tokens: vec![0, 1], ..sampling };
    let error = Sampler::new().sample(&row(&[0.0, 1.0], &nothing, &seen), Rng::new(&[0])).unwrap_err();
    assert!(matches!(&error, Error::Invalid(message) if message.contains("row 7")), "{error}");
}

#[test]
fn extreme_values_keep_one_token() {
    let logits = [-3e38f32, 3e38, 0.0, 2.9e38];
    for temperature in [0.0, 1e-45, 1e-6, 1.0, 1e6] {
        for (top_k, top_p, min_p, typical_p) in [(0, 1.0, 0.0, 1.0), (1, 1e-9, 1.0, 1e-9), (9, 0.9, 0.1, 0.9)]
        {
            let sampling = Sampling { temperature, top_k, top_p, min_p, typical_p, ..Sampling::default() };
            let seen = Seen::new(&[], &sampling);
            let drawn = Sampler::new().sample(&row(&logits, &sampling, &seen), Rng::new(&[0])).unwrap();
            assert_eq!((drawn.token, drawn.logp), (1, 0.0), "{sampling:?}");
        }
    }
}

#[test]
fn a_row_is_drawn_alike_whatever_was_drawn_before() {
    let first = random_logits(Rng::new(&[17]), 400, 2.0, 8.0);
    let second = random_logits(Rng::new(&[18]), 90, 2.0, 8.0);
    let mut used = Sampler::new();
    for case in 0..200 {
        let sampling = random_sampling(Rng::new(&[19, case]), 90);
        let seen = Seen::new(&[1, 2], &sampling);
        let rng = Rng::new(&[20, case]);
        let _ = used.sample(&row(&first, &sampling, &seen), rng);
        let (again, fresh) = (
            used.sample(&row(&second, &sampling, &seen), rng),
            Sampler::new().sample(&row(&second, &sampling, &seen), rng),
        );
        assert_eq!(again.ok(), fresh.ok(), "{sampling:?}");
    }
}
