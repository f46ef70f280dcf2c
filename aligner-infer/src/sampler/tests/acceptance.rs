//! Accepted and replaced tokens together have the target's distribution.

use super::*;

fn distribution(logits: &[f32], sampling: &Sampling) -> Distribution {
    let seen = Seen::new(&[], sampling);
    let mut into = Distribution::default();
    Sampler::new().distribution(&row(logits, sampling, &seen), &mut into).unwrap();
    into
}

/// Counts of the tokens that stand at the place of proposals drawn from `draft`, and of accepted ones.
fn outcomes(target: &Distribution, draft: &Distribution, vocab: usize, key: u64) -> (Vec<usize>, usize) {
    let rng = Rng::new(&[21, key]);
    let (mut counts, mut accepted) = (vec![0; vocab], 0);
    for i in 0..60_000 {
        let proposed = draft.draw(rng.uniform(3 * i));
        let verdict = accept(target, Some(draft), proposed, rng.uniform(3 * i + 1), rng.uniform(3 * i + 2));
        let token = match verdict {
            Verdict::Accepted => {
                accepted += 1;
                proposed
            }
            Verdict::Replaced(token) => token,
        };
        counts[token as usize] += 1;
    }
    (counts, accepted)
}

#[test]
fn draws_of_a_draft_end_in_the_targets_distribution() {
    let vocab = 200;
    let base = Sampling::default;
    let settings = [
        (base(), base()),
        (Sampling { top_k: 6, ..base() }, base()),
        (base(), Sampling { top_p: 0.5, ..base() }),
        (Sampling { top_p: 0.7, ..base() }, Sampling { temperature: 2.0, top_k: 12, ..base() }),
        (Sampling { temperature: 0.0, ..base() }, base()),
        (base(), Sampling { temperature: 0.0, ..base() }),
    ];
    for (case, (target, draft)) in settings.iter().enumerate() {
        let logits = random_logits(Rng::new(&[22]), vocab, 1.5, 1e6);
        let noise = random_logits(Rng::new(&[23]), vocab, 0.8, 1e6);
        let drafted: Vec<f32> = logits.iter().zip(&noise).map(|(a, b)| a + b).collect();
        let (target, draft) = (distribution(&logits, target), distribution(&drafted, draft));
        let (counts, accepted) = outcomes(&target, &draft, vocab, case as u64);
        let p: Vec<f64> = (0..vocab as u32).map(|token| target.probability(token)).collect();
        check_frequencies(&counts, &p, &format!("case {case}"));
        // Leviathan et al., theorem 3.5: the acceptance rate is the sum of min(p, q).
        let overlap: f64 = (0..vocab as u32).map(|t| target.probability(t).min(draft.probability(t))).sum();
        check_frequencies(&[accepted, 60_000 - accepted], &[overlap, 1.0 - overlap], "acceptance");
    }
}

#[test]
fn equal_distributions_accept_everything_and_disjoint_ones_nothing() {
    let logits = random_logits(Rng::new(&[24]), 50, 1.0, 1e6);
    let p = distribution(&logits, &Sampling::default());
    assert_eq!(outcomes(&p, &p, 50, 10).1, 60_000);
    assert_eq!(
        accept(&Distribution::point(3), Some(&Distribution::point(4)), 4, 0.0, 0.9),
        Verdict::Replaced(3)
    );
    assert_eq!(
        accept(&Distribution::point(4), Some(&Distribution::point(4)), 4, 0.99, 0.9),
        Verdict::Accepted
    );
}

#[test]
fn a_fixed_proposal_gives_the_plain_draw() {
    let logits = random_logits(Rng::new(&[25]), 100, 1.5, 1e6);
    let rng = Rng::new(&[26]);
    for sampling in [Sampling::default(), Sampling { top_k: 5, ..Sampling::default() }] {
        let target = distribution(&logits, &sampling);
        let (proposed, _) = target.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        let (mut accepted, draws) = (0, 20_000);
        for i in 0..draws {
            let uniform = rng.uniform(i as u64);
            let plain = target.draw(uniform);
            match accept(&target, None, proposed, 0.5, uniform) {
                Verdict::Accepted => {
                    assert_eq!(plain, proposed);
                    accepted += 1;
                }
                Verdict::Replaced(token) => assert!(token == plain && token != proposed),
            }
        }
        let p = target.probability(proposed);
        check_frequencies(&[accepted, draws - accepted], &[p, 1.0 - p], "acceptance");
    }
}
