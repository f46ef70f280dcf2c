//! Which rank computes which rows of a packed batch, and which of another rank's keys they see.

use std::ops::Range;
use std::sync::Arc;

use aligner_core::ops::{Keys, Plan, Run, trees};
use aligner_core::{Error, Result, Segment};

/// Consecutive rows of a segment that one rank computes.
#[derive(Debug, Clone)]
struct Piece {
    segment: usize,
    /// Rows of the batch.
    rows: Range<usize>,
    /// Where they begin among the rank's own.
    start: usize,
    /// The first one's position in its sequence.
    position: usize,
}

impl Piece {
    fn own_rows(&self) -> Range<usize> {
        self.start..self.start + self.rows.len()
    }
}

/// The rows of every rank.
#[derive(Debug, Clone)]
pub(super) struct Partition {
    /// By rank, in the order of rows.
    pieces: Vec<Vec<Piece>>,
    /// The segments that each segment sees whole.
    ancestors: Vec<Vec<usize>>,
    /// The tree of each segment.
    trees: Vec<usize>,
}

impl Partition {
    /// Shares out the rows of `segments` to `ranks`.
    pub(super) fn new(segments: &[Segment], ranks: usize) -> Result<Self> {
        let tokens: usize = segments.iter().map(|segment| segment.len).sum();
        if tokens < ranks {
            return Err(Error::Invalid(format!(
                "a micro-batch of {tokens} tokens cannot be shared by {ranks} context-parallel ranks; raise \
                 micro_batch_tokens or lower cp"
            )));
        }
        let mut pieces = zigzag(segments, ranks);
        if pieces.iter().any(Vec::is_empty) {
            pieces = runs(segments, tokens, ranks);
        }
        let parent = |&at: &usize| segments[at].parent;
        let ancestors = (0..segments.len())
            .map(|at| std::iter::successors(segments[at].parent, parent).collect::<Vec<_>>())
            .collect();
        Ok(Self { pieces, ancestors, trees: trees(segments) })
    }

    /// How many rows a rank has.
    pub(super) fn count(&self, rank: usize) -> usize {
        self.pieces[rank].last().map_or(0, |piece| piece.own_rows().end)
    }

    /// A rank's rows of the batch, ascending.
    pub(super) fn rows(&self, rank: usize) -> Arc<[u32]> {
        self.pieces[rank].iter().flat_map(|piece| piece.rows.clone()).map(|row| row as u32).collect()
    }

    /// What rows of `rank` see of the keys of `owner`.
    pub(super) fn plan(&self, rank: usize, owner: usize) -> Plan {
        let trees = self.runs(rank, &self.pieces[owner].iter(), Piece::own_rows);
        Plan { trees, queries: self.count(rank), keys: self.count(owner) }
    }

    /// What rows of `rank` see of the keys of all rows of the batch, in its order.
    pub(super) fn plan_of_all(&self, rank: usize) -> Plan {
        let trees = self.runs(rank, &self.pieces.iter().flatten(), |piece| piece.rows.clone());
        let keys = (0..self.pieces.len()).map(|rank| self.count(rank)).sum();
        Plan { trees, queries: self.count(rank), keys }
    }

    /// What rows of `rank` see of keys that lie where `place` says.
    fn runs<'a>(
        &self,
        rank: usize,
        all_keys: &(impl IntoIterator<Item = &'a Piece> + Clone),
        place: impl Fn(&Piece) -> Range<usize>,
    ) -> Vec<Vec<Run>> {
        let mut by_tree = vec![Vec::new(); self.trees.iter().max().map_or(0, |last| last + 1)];
        for piece in &self.pieces[rank] {
            let (queries, position) = (piece.own_rows(), piece.position);
            let mut run = Run { queries, position, seen: Vec::new(), own: None };
            for keys in all_keys.clone() {
                let is_earlier = keys.segment == piece.segment && keys.rows.end <= piece.rows.start;
                if is_earlier || self.ancestors[piece.segment].contains(&keys.segment) {
                    run.seen.push(Keys { rows: place(keys), position: keys.position });
                } else if keys.rows == piece.rows {
                    run.own = Some(place(keys).start);
                }
            }
            by_tree[self.trees[piece.segment]].push(run);
        }
        by_tree
    }
}

/// Two chunks of each segment for each rank, one from either end.
fn zigzag(segments: &[Segment], ranks: usize) -> Vec<Vec<Piece>> {
    let mut pieces = vec![Vec::new(); ranks];
    for (index, segment) in segments.iter().enumerate() {
        let chunks = 2 * ranks;
        let bound = |chunk: usize| segment.start + chunk * segment.len / chunks;
        for chunk in 0..chunks {
            let place = chunk.min(chunks - 1 - chunk);
            give(&mut pieces[(place + index) % ranks], (index, segment), bound(chunk)..bound(chunk + 1));
        }
    }
    pieces
}

/// Equally many consecutive rows for each rank.
fn runs(segments: &[Segment], tokens: usize, ranks: usize) -> Vec<Vec<Piece>> {
    let mut pieces = vec![Vec::new(); ranks];
    for (rank, pieces) in pieces.iter_mut().enumerate() {
        let own = rank * tokens / ranks..(rank + 1) * tokens / ranks;
        for (index, segment) in segments.iter().enumerate() {
            let rows = segment.rows();
            give(pieces, (index, segment), rows.start.max(own.start)..rows.end.min(own.end));
        }
    }
    pieces
}

fn give(pieces: &mut Vec<Piece>, (index, segment): (usize, &Segment), rows: Range<usize>) {
    if rows.is_empty() {
        return;
    }
    let start = pieces.last().map_or(0, |piece| piece.own_rows().end);
    let position = segment.position + rows.start - segment.start;
    pieces.push(Piece { segment: index, rows, start, position });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(lens: &[(usize, Option<usize>)]) -> Vec<Segment> {
        let mut start = 0;
        let segment = |&(len, parent): &(usize, Option<usize>)| {
            start += len;
            Segment { start: start - len, len, position: 0, parent }
        };
        lens.iter().map(segment).collect()
    }

    fn sees(segments: &[Segment], query: usize, key: usize) -> bool {
        let of = |row: usize| segments.iter().position(|segment| segment.rows().contains(&row)).unwrap();
        let (own, other) = (of(query), of(key));
        let mut chain = std::iter::successors(segments[own].parent, |&at| segments[at].parent);
        (own == other && key <= query) || chain.any(|at| at == other)
    }

    /// The keys that each row sees, by the batch's numbers, of which `queries` and `keys` are the plan's.
    fn seen_in(plan: Plan, queries: &[u32], keys: &[u32]) -> Vec<(u32, Vec<u32>)> {
        let mut all = Vec::new();
        for run in plan.trees.into_iter().flatten() {
            for (at, query) in run.queries.clone().enumerate() {
                let own = run.own.map_or(0..0, |own| own..own + at + 1);
                let rows = run.seen.iter().flat_map(|keys| keys.rows.clone()).chain(own);
                all.push((queries[query], rows.map(|row| keys[row]).collect()));
            }
        }
        all
    }

    fn seen(partition: &Partition, rank: usize, owner: usize) -> Vec<(u32, Vec<u32>)> {
        seen_in(partition.plan(rank, owner), &partition.rows(rank), &partition.rows(owner))
    }

    #[test]
    fn every_row_is_one_ranks_and_sees_its_keys_once() {
        let cases = [
            segments(&[(17, None)]),
            segments(&[(9, None), (5, Some(0)), (1, Some(0)), (0, None), (12, None), (3, Some(1))]),
            segments(&[(1, None); 5]),
        ];
        for segments in &cases {
            let tokens: usize = segments.iter().map(|segment| segment.len).sum();
            for ranks in 1..=4 {
                let partition = Partition::new(segments, ranks).unwrap();
                let mut rows: Vec<u32> = (0..ranks).flat_map(|rank| partition.rows(rank).to_vec()).collect();
                rows.sort_unstable();
                assert_eq!(rows, (0..tokens as u32).collect::<Vec<_>>());
                for rank in 0..ranks {
                    assert!(partition.rows(rank).is_sorted() && partition.count(rank) > 0);
                    let mut keys = vec![Vec::new(); tokens];
                    for owner in 0..ranks {
                        for (query, seen) in seen(&partition, rank, owner) {
                            keys[query as usize].extend(seen);
                        }
                    }
                    let all: Vec<u32> = (0..tokens as u32).collect();
                    let of_all = seen_in(partition.plan_of_all(rank), &partition.rows(rank), &all);
                    assert_eq!(of_all.len(), partition.count(rank));
                    for (query, mut seen) in of_all {
                        seen.sort_unstable();
                        let mut by_owner = keys[query as usize].clone();
                        by_owner.sort_unstable();
                        assert_eq!(seen, by_owner, "row {query} of {ranks} ranks");
                    }
                    for &query in partition.rows(rank).iter() {
                        let mut own = std::mem::take(&mut keys[query as usize]);
                        own.sort_unstable();
                        let all = 0..tokens as u32;
                        let expected: Vec<u32> =
                            all.filter(|&key| sees(segments, query as usize, key as usize)).collect();
                        assert_eq!(own, expected, "row {query} of {ranks} ranks");
                    }
                }
            }
        }
    }

    #[test]
    fn causal_work_is_balanced() {
        let segments = segments(&[(1024, None), (512, Some(0)), (512, Some(0)), (2048, None)]);
        let partition = Partition::new(&segments, 4).unwrap();
        let work = |rank: usize| -> usize {
            let all = (0..4).flat_map(|owner| seen(&partition, rank, owner));
            all.map(|(_, keys)| keys.len()).sum()
        };
        let work: Vec<usize> = (0..4).map(work).collect();
        let (least, most) = (work.iter().min().unwrap(), work.iter().max().unwrap());
        assert!(most * 100 < least * 103, "{work:?}");
    }

    #[test]
    fn too_few_rows_are_refused() {
        let message = Partition::new(&segments(&[(3, None)]), 4).unwrap_err().to_string();
        assert!(message.contains("3 tokens") && message.contains("cp"), "{message}");
    }
}
