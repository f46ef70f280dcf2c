//! Reductions over the units of a cube, in memory that they share: a tree of fixed shape.

use cubecl::prelude::*;

/// Sums each of `lines` lines of `shared`, `[lines, units]`, into its first element.
///
/// All units of the cube take part; every unit may read the results afterwards.
#[cube]
pub(super) fn sum_lines<F: Float>(
    shared: &mut Shared<[F]>,
    #[comptime] lines: usize,
    #[comptime] units: usize,
) {
    let mut width = comptime!(units / 2).runtime();
    sync_cube();
    while width > 0 {
        let mut at = UNIT_POS as usize;
        while at < lines * width {
            let to = at / width * units + at % width;
            shared[to] = shared[to] + shared[to + width];
            at += units;
        }
        width /= 2;
        sync_cube();
    }
}

/// The largest element of each line, likewise.
#[cube]
pub(super) fn max_lines<F: Numeric>(
    shared: &mut Shared<[F]>,
    #[comptime] lines: usize,
    #[comptime] units: usize,
) {
    let mut width = comptime!(units / 2).runtime();
    sync_cube();
    while width > 0 {
        let mut at = UNIT_POS as usize;
        while at < lines * width {
            let to = at / width * units + at % width;
            if shared[to + width] > shared[to] {
                shared[to] = shared[to + width];
            }
            at += units;
        }
        width /= 2;
        sync_cube();
    }
}
