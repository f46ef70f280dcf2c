//! Acceptance of proposed tokens, exact in distribution.

use super::Distribution;

/// What becomes of a proposed token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It stays, and the next proposed token is looked at.
    Accepted,
    /// This token takes its place, and the proposed tokens after it are dropped.
    Replaced(u32),
}

/// Accepts `proposed` or replaces it, so that the token which stands at its place has the distribution
/// `target`, whatever proposed it (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023,
/// arXiv:2302.01318, algorithm 2).
///
/// `draft` is the distribution that `proposed` was drawn from; absent, the proposal is a fixed one, as
/// from an n-gram. The two uniforms are in [0, 1), independent of each other and of the draw from the
/// draft.
///
/// For a fixed proposal, the paper's rule (stay with probability p(proposed), else draw from p without
/// it) is that of drawing from `target` and comparing, so this is what happens: `u_accept` is not used,
/// and with the plain engine's uniform as `u_resample` the response is the plain engine's, token by token.
/// A greedy target is a point: the proposal stays where it is the likeliest token.
pub fn accept(
    target: &Distribution,
    draft: Option<&Distribution>,
    proposed: u32,
    u_accept: f64,
    u_resample: f64,
) -> Verdict {
    let token = match draft {
        None => target.draw(u_resample),
        Some(draft) if u_accept * draft.probability(proposed) < target.probability(proposed) => proposed,
        Some(draft) => resample(target, draft, u_resample),
    };
    if token == proposed { Verdict::Accepted } else { Verdict::Replaced(token) }
}

/// Draws from max(0, p - q), renormalised.
fn resample(target: &Distribution, draft: &Distribution, uniform: f64) -> u32 {
    let total: f64 = residual(target, draft).map(|(_, rest)| rest).sum();
    let mut left = uniform * total;
    let mut last = None;
    for (token, rest) in residual(target, draft).filter(|(_, rest)| *rest > 0.0) {
        if left < rest {
            return token;
        }
        left -= rest;
        last = Some(token);
    }
    // Rounding left the point at the very end, or p and q are equal but for rounding.
    last.unwrap_or_else(|| target.draw(uniform))
}

/// The tokens of `target` with max(0, p - q), ascending.
fn residual<'a>(target: &'a Distribution, draft: &'a Distribution) -> impl Iterator<Item = (u32, f64)> + 'a {
    let mut others = draft.iter().peekable();
    target.iter().map(move |(token, p)| {
        while others.next_if(|(other, _)| *other < token).is_some() {}
        let q = others.next_if(|(other, _)| *other == token).map_or(0.0, |(_, q)| q);
        (token, (p - q).max(0.0))
    })
}
