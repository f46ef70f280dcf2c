//! The kernel of a draw: one cube for each row.

use cubecl::prelude::*;

use crate::ops::cube::shared::{max_lines, sum_lines};

/// Numbers about a draw: one over the temperature, how many and how much probability to keep, the least weight to
/// keep, and the draw in [0, 1).
const SETTINGS: usize = 5;
/// Numbers about a drawn token: its id, its weight, the sum of the kept weights, its logit, the largest logit, and
/// the sum of `e^(logit - largest)`. The id is -1 where nothing could be drawn.
pub(super) const RESULTS: usize = 6;

/// Below this exponent a weight counts as 0, as on the host.
const LEAST: f32 = -87.0;
/// The order of negative infinity; what is kept is above.
const ORDER_OF_NOTHING: u32 = 0x007F_FFFF;
/// Digits of four bits, the value 0 of which needs no sum.
const DIGITS: usize = 15;

/// A row of logits and what turns it into weights.
#[derive(CubeType, Clone, Copy)]
struct Row {
    start: usize,
    vocab: usize,
    largest: f32,
    scale: f32,
}

/// How a row's token is drawn.
#[derive(CubeType, Clone, Copy)]
struct Settings {
    scale: f64,
    top_k: f64,
    top_p: f64,
    min_p: f64,
    uniform: f64,
}

#[cube]
fn settings_of(all: &[f64], row: usize) -> Settings {
    let at = row * SETTINGS;
    Settings {
        scale: all[at],
        top_k: all[at + 1],
        top_p: all[at + 2],
        min_p: all[at + 3],
        uniform: all[at + 4],
    }
}

/// What is kept: all above an order, of those that have it the ones up to an id, and nothing that weighs less than
/// `min_p`.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    least: u32,
    last: usize,
    min_p: f32,
}

/// An integer that is larger where the logit is larger; both zeros have the same.
#[cube]
fn order_of(logit: f32) -> u32 {
    let bits = u32::reinterpret(logit + 0.0);
    // The sum with 0 may be left out by a compiler: negative zero is caught by hand.
    let bits = select(bits == 0x8000_0000u32, 0u32, bits);
    select(bits >= 0x8000_0000u32, !bits, bits | 0x8000_0000u32)
}

#[cube]
fn weight_of(logit: f32, row: &Row) -> f32 {
    let exponent = (logit - row.largest) * row.scale;
    select(exponent < LEAST, 0.0, exponent.exp())
}

/// Counts, or sums the weights of, the tokens whose order is above `than`, and those that have it.
#[cube]
fn measure_at(
    logits: &[f32],
    row: &Row,
    than: u32,
    shared: &mut Shared<[f64]>,
    #[comptime] mass: bool,
    #[comptime] units: usize,
) -> (f64, f64) {
    let unit = UNIT_POS as usize;
    let mut above = f64::new(0.0);
    let mut equal = f64::new(0.0);
    let mut at = unit;
    while at < row.vocab {
        let logit = logits[row.start + at];
        let order = order_of(logit);
        let mut measure = f64::new(1.0);
        if mass {
            measure = f64::cast_from(weight_of(logit, row));
        }
        if order > than {
            above += measure;
        }
        if order == than {
            equal += 1.0;
        }
        at += units;
    }
    sync_cube();
    shared[unit] = above;
    shared[units + unit] = equal;
    sum_lines::<f64>(shared, 2usize, units);
    let above = shared[0];
    let equal = shared[units];
    sync_cube();
    (above, equal)
}

/// The largest order such that the tokens of at least this order are `target` many, or weigh as much; the
/// least one of a finite logit where they are never.
#[cube]
fn least_order(
    logits: &[f32],
    row: &Row,
    target: f64,
    shared: &mut Shared<[f64]>,
    #[comptime] mass: bool,
    #[comptime] units: usize,
) -> u32 {
    let unit = UNIT_POS as usize;
    let mut found = 0u32;
    let mut shift = 28u32;
    let mut digit = 0u32;
    while digit < 8 {
        let mut sums = Array::<f64>::new(DIGITS);
        #[unroll]
        for d in 0..DIGITS {
            sums[d] = 0.0;
        }
        let mut at = unit;
        while at < row.vocab {
            let logit = logits[row.start + at];
            let order = order_of(logit);
            if order >= found && order > ORDER_OF_NOTHING {
                let mut measure = f64::new(1.0);
                if mass {
                    measure = f64::cast_from(weight_of(logit, row));
                }
                let reached = (order - found) >> shift;
                #[unroll]
                for d in 0..DIGITS {
                    if reached > comptime!(d as u32) {
                        sums[d] += measure;
                    }
                }
            }
            at += units;
        }
        sync_cube();
        #[unroll]
        for d in 0..DIGITS {
            shared[d * units + unit] = sums[d];
        }
        sum_lines::<f64>(shared, DIGITS, units);
        let mut best = 0u32;
        #[unroll]
        for d in 0..DIGITS {
            if shared[d * units] >= target {
                best = comptime!(d as u32 + 1);
            }
        }
        found += best << shift;
        sync_cube();
        shift = select(shift >= 4, shift - 4, 0u32);
        digit += 1;
    }
    clamp_min(found, ORDER_OF_NOTHING + 1)
}

/// Draws a token from each row.
#[cube(launch)]
pub(super) fn draw(
    logits: &[f32],
    numbers: &[f64],
    results: &mut [f64],
    vocab: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let index = CUBE_POS_X as usize;
    let start = index * vocab;
    let mut shared = Shared::<[f64]>::new_slice(comptime!(DIGITS * units));
    // The largest logit, and whether one is NaN or positive infinity.
    let mut floats_shared = Shared::<[f32]>::new_slice(comptime!(2 * units));
    let mut largest = f32::new(f32::NEG_INFINITY);
    let mut bad = f32::new(0.0);
    let mut at = unit;
    while at < vocab {
        let logit = logits[start + at];
        if logit > largest {
            largest = logit;
        }
        if order_of(logit) >= 0xFF80_0000u32 || order_of(logit) < ORDER_OF_NOTHING {
            bad = 1.0;
        }
        at += units;
    }
    floats_shared[unit] = largest;
    floats_shared[units + unit] = bad;
    max_lines::<f32>(&mut floats_shared, 2usize, units);
    let largest = floats_shared[0];
    let refused = floats_shared[units] > 0.0 || order_of(largest) <= ORDER_OF_NOTHING;
    if refused {
        if unit == 0 {
            results[index * RESULTS] = f64::new(-1.0);
        }
    } else {
        let settings = settings_of(numbers, index);
        let row = Row { start, vocab, largest, scale: f32::cast_from(settings.scale) };
        let raw = Row { start, vocab, largest, scale: f32::new(1.0) };
        let (raw_total, _) = measure_at(logits, &raw, 0u32, &mut shared, true, units);
        let mut least = comptime!(ORDER_OF_NOTHING + 1).runtime();
        // How many of those with the least order are kept.
        let mut ties = f64::cast_from(vocab);
        if settings.top_k > 0.0 {
            least = least_order(logits, &row, settings.top_k, &mut shared, false, units);
            let (above, equal) = measure_at(logits, &row, least, &mut shared, false, units);
            ties = clamp_max(settings.top_k - above, equal);
        }
        if settings.top_p < 1.0 {
            let mut weight = weight_at(least, &row);
            let (above, equal) = measure_at(logits, &row, least, &mut shared, true, units);
            let target = settings.top_p * (above + weight * clamp_max(ties, equal));
            let nucleus = least_order(logits, &row, target, &mut shared, true, units);
            let mut left = target - above;
            if nucleus > least {
                weight = weight_at(nucleus, &row);
                let (above, equal) = measure_at(logits, &row, nucleus, &mut shared, true, units);
                left = target - above;
                ties = equal;
                least = nucleus;
            }
            // As many as reach the target; at least one.
            if weight > 0.0 {
                ties = clamp_max((left / weight).ceil(), ties);
            }
            ties = clamp_min(ties, 1.0);
        }
        let last = last_tie(logits, &row, least, ties, &mut shared, units);
        let kept = Kept { least, last, min_p: f32::cast_from(settings.min_p) };
        pick(logits, &row, &kept, settings.uniform, &mut shared, results, units);
        if unit == 0 {
            results[index * RESULTS + 5] = raw_total;
        }
    }
}

/// The weight of the logits with this order.
#[cube]
fn weight_at(order: u32, row: &Row) -> f64 {
    let bits = select(order >= 0x8000_0000u32, order & 0x7FFF_FFFFu32, !order);
    f64::cast_from(weight_of(f32::reinterpret(bits), row))
}

/// The last id of the first `ties` tokens whose order is `least`; all are first where there are no more.
#[cube]
fn last_tie(
    logits: &[f32],
    row: &Row,
    least: u32,
    ties: f64,
    shared: &mut Shared<[f64]>,
    #[comptime] units: usize,
) -> usize {
    let unit = UNIT_POS as usize;
    let chunk = row.vocab.div_ceil(units);
    let begin = clamp_max(unit * chunk, row.vocab);
    let end = clamp_max(begin + chunk, row.vocab);
    let mut count = f64::new(0.0);
    for at in begin..end {
        if order_of(logits[row.start + at]) == least {
            count += 1.0;
        }
    }
    sync_cube();
    shared[unit] = count;
    sync_cube();
    if unit == 0 {
        let mut left = ties;
        let mut place = 0usize;
        while place < units && shared[place] < left {
            left -= shared[place];
            place += 1;
        }
        let mut last = row.vocab;
        if place < units {
            let mut at = place * chunk;
            while at < row.vocab && left > 0.0 {
                if order_of(logits[row.start + at]) == least {
                    left -= 1.0;
                    last = at;
                }
                at += 1;
            }
        }
        shared[units] = f64::cast_from(last);
    }
    sync_cube();
    let last = usize::cast_from(shared[units]);
    sync_cube();
    last
}

/// The weight of a token, 0 where it is not kept.
#[cube]
fn kept_weight(logit: f32, at: usize, row: &Row, kept: &Kept) -> f64 {
    let order = order_of(logit);
    let weight = weight_of(logit, row);
    let is_kept = order > kept.least || (order == kept.least && at <= kept.last);
    f64::cast_from(select(is_kept && weight >= kept.min_p, weight, 0.0))
}

/// Draws among the kept tokens, in the order of their ids.
#[cube]
fn pick(
    logits: &[f32],
    row: &Row,
    kept: &Kept,
    uniform: f64,
    shared: &mut Shared<[f64]>,
    results: &mut [f64],
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let chunk = row.vocab.div_ceil(units);
    let begin = clamp_max(unit * chunk, row.vocab);
    let end = clamp_max(begin + chunk, row.vocab);
    let mut sum = f64::new(0.0);
    for at in begin..end {
        sum += kept_weight(logits[row.start + at], at, row, kept);
    }
    shared[unit] = sum;
    sync_cube();
    if unit == 0 {
        let mut total = f64::new(0.0);
        for place in 0..units {
            total += shared[place];
        }
        // The chunk in which the draw falls; the last one with any weight where rounding left it past it.
        let mut left = uniform * total;
        let mut place = 0usize;
        let mut chosen = 0usize;
        let mut inside = false;
        while place < units && !inside {
            if shared[place] > 0.0 {
                chosen = place;
                if left < shared[place] {
                    inside = true;
                } else {
                    left -= shared[place];
                }
            }
            place += 1;
        }
        let mut token = 0usize;
        let mut weight = f64::new(0.0);
        let mut found = false;
        let mut at = chosen * chunk;
        let stop = clamp_max(at + chunk, row.vocab);
        while at < stop && !found {
            let here = kept_weight(logits[row.start + at], at, row, kept);
            if here > 0.0 {
                token = at;
                weight = here;
                if inside && left < here {
                    found = true;
                }
                left -= here;
            }
            at += 1;
        }
        let to = CUBE_POS_X as usize * RESULTS;
        results[to] = f64::cast_from(token);
        results[to + 1] = weight;
        results[to + 2] = total;
        results[to + 3] = f64::cast_from(logits[row.start + token]);
        results[to + 4] = f64::cast_from(row.largest);
    }
}
