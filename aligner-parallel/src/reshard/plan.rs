//! Who sends which block of which parameter to whom.

use std::collections::BTreeMap;
use std::ops::Range;

use aligner_core::{Error, Result};

use super::Layout;

/// A block of a parameter, which is seen as a matrix `[rows, columns]`, on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The parameter, by its place in the layouts.
    pub param: usize,
    /// The rank that has it.
    pub from: usize,
    /// The rank that needs it.
    pub to: usize,
    /// Its rows in the whole parameter.
    pub rows: Range<usize>,
    /// Its columns there.
    pub columns: Range<usize>,
}

/// What a plan moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes between ranks.
    pub bytes: usize,
    /// The least that any plan moves: each element that a rank needs and has not has to come to it once.
    pub least: usize,
    /// The most that one rank sends.
    pub most_sent: usize,
    /// The most that one rank gets.
    pub most_received: usize,
    /// How many buckets there are.
    pub buckets: usize,
    /// The most bytes that a rank has in a bucket that it sends and in the one that it gets: what a plan takes beside
    /// the parameters in both layouts.
    pub extra: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Plan {
    transfers: Vec<Transfer>,
    /// Runs of transfers that go together.
    buckets: Vec<Range<usize>>,
    /// Blocks that a rank has already.
    copies: Vec<Transfer>,
}

const BYTES: usize = size_of::<f32>();

impl Plan {
    pub(super) fn new(from: &Layout, to: &Layout, bucket_bytes: usize) -> Result<Self> {
        if !from.is_about(to) {
            return Err(Error::Invalid("two layouts of other parameters, or on other ranks".into()));
        }
        let (mut sent, mut transfers, mut copies) = (vec![0; from.ranks()], Vec::new(), Vec::new());
        for param in 0..from.params() {
            for ((rows, columns), holders) in blocks(from, param)? {
                for rank in 0..to.ranks() {
                    let needed = to.tiles(rank, param).iter().filter_map(|tile| {
                        let rows = common(&tile.rows, &rows)?;
                        Some((rows, common(&tile.columns, &columns)?))
                    });
                    for (rows, columns) in needed {
                        let elements = rows.len() * columns.len();
                        if holders.contains(&rank) {
                            copies.push(Transfer { param, from: rank, to: rank, rows, columns });
                            continue;
                        }
                        // Of those that have sent as much, the nearest.
                        let source = holders.iter().copied();
                        let source = source.min_by_key(|&holder| (sent[holder], holder.abs_diff(rank)));
                        let Some(source) = source else { continue };
                        sent[source] += elements;
                        let rest = Transfer { param, from: source, to: rank, rows, columns };
                        transfers.extend(rest.in_parts(bucket_bytes / BYTES));
                    }
                }
            }
        }
        let buckets = buckets(&transfers, from.ranks(), bucket_bytes / BYTES);
        Ok(Self { transfers, buckets, copies })
    }

    pub(super) fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    pub(super) fn copies(&self) -> &[Transfer] {
        &self.copies
    }

    pub(super) fn buckets(&self) -> impl Iterator<Item = &[Transfer]> {
        self.buckets.iter().map(|bucket| &self.transfers[bucket.clone()])
    }

    pub(super) fn traffic(&self, from: &Layout, to: &Layout) -> Traffic {
        let ranks = from.ranks();
        let most =
            |of: fn(&Transfer) -> usize| loads(&self.transfers, ranks, of).into_iter().max().unwrap_or(0);
        let extra = self.buckets().flat_map(|bucket| {
            let (sent, received) =
                (loads(bucket, ranks, |step| step.from), loads(bucket, ranks, |step| step.to));
            sent.into_iter().zip(received).map(|(sent, received)| sent + received).collect::<Vec<_>>()
        });
        Traffic {
            bytes: BYTES * self.transfers.iter().map(Transfer::elements).sum::<usize>(),
            least: BYTES * least(from, to),
            most_sent: BYTES * most(|step| step.from),
            most_received: BYTES * most(|step| step.to),
            buckets: self.buckets.len(),
            extra: BYTES * extra.max().unwrap_or(0),
        }
    }
}

impl Transfer {
    /// Itself in runs of rows of at most `limit` elements; a row is never cut.
    fn in_parts(self, limit: usize) -> impl Iterator<Item = Self> {
        let height = (limit / self.columns.len().max(1)).max(1);
        let starts = self.rows.clone().step_by(height);
        starts.map(move |start| Self { rows: start..self.rows.end.min(start + height), ..self.clone() })
    }
}

type Block = (Range<usize>, Range<usize>);

/// The blocks that a parameter lies in, each with the ranks that have it.
fn blocks(layout: &Layout, param: usize) -> Result<Vec<(Block, Vec<usize>)>> {
    let mut blocks: BTreeMap<[usize; 4], Vec<usize>> = BTreeMap::new();
    for rank in 0..layout.ranks() {
        for tile in layout.tiles(rank, param) {
            let key = [tile.rows.start, tile.columns.start, tile.rows.end, tile.columns.end];
            blocks.entry(key).or_default().push(rank);
        }
    }
    // Parts of a parameter do not overlap, so they are all of it where their sizes add up to it.
    let held: usize =
        blocks.keys().map(|[row, column, rows, columns]| (rows - row) * (columns - column)).sum();
    let (name, all) = (layout.name(param), layout.elements(param));
    if held != all {
        return Err(Error::Invalid(format!("the ranks have {held} of the {all} elements of {name}")));
    }
    let block =
        |([row, column, rows, columns], ranks): ([usize; 4], _)| ((row..rows, column..columns), ranks);
    Ok(blocks.into_iter().map(block).collect())
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let common = a.start.max(b.start)..a.end.min(b.end);
    (!common.is_empty()).then_some(common)
}

/// The elements of each rank's transfers.
fn loads(transfers: &[Transfer], ranks: usize, of: fn(&Transfer) -> usize) -> Vec<usize> {
    let mut loads = vec![0; ranks];
    for step in transfers {
        loads[of(step)] += step.elements();
    }
    loads
}

/// Runs in which no rank sends or gets more than `limit` elements, but for a transfer that is larger.
fn buckets(transfers: &[Transfer], ranks: usize, limit: usize) -> Vec<Range<usize>> {
    let (mut buckets, mut start) = (Vec::new(), 0);
    let (mut sent, mut received) = (vec![0; ranks], vec![0; ranks]);
    for (at, step) in transfers.iter().enumerate() {
        let elements = step.elements();
        let fits = |load: usize| load + elements <= limit;
        if at > start && !(fits(sent[step.from]) && fits(received[step.to])) {
            buckets.push(start..at);
            start = at;
            sent.fill(0);
            received.fill(0);
        }
        sent[step.from] += elements;
        received[step.to] += elements;
    }
    if start < transfers.len() {
        buckets.push(start..transfers.len());
    }
    buckets
}

/// The elements that ranks need and have not, counted from the layouts alone.
fn least(from: &Layout, to: &Layout) -> usize {
    let of = |rank: usize, param: usize| {
        let (held, needed) = (from.tiles(rank, param), to.tiles(rank, param));
        let common = |(a, b): (&super::Tile, &super::Tile)| {
            let rows = common(&a.rows, &b.rows).map_or(0, |rows| rows.len());
            rows * common(&a.columns, &b.columns).map_or(0, |columns| columns.len())
        };
        let there: usize = held.iter().flat_map(|a| needed.iter().map(move |b| (a, b))).map(common).sum();
        needed.iter().map(super::Tile::elements).sum::<usize>() - there
    };
    (0..from.ranks()).flat_map(|rank| (0..from.params()).map(move |param| of(rank, param))).sum()
}
