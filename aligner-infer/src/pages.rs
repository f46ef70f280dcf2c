//! Pages of the key-value cache: who holds them, and which prompts they hold already.
//!
//! A page is [`PAGE`] positions of one sequence, in all layers. Requests that begin alike share pages; a
//! page that several hold, or that the prefix index knows, is copied before somebody writes over what
//! they see.

use std::collections::{BTreeMap, HashMap};

use aligner_core::ops::rows::PAGE;

/// A page's number.
pub(crate) type Page = u32;

/// Names a run of tokens in the prefix index, with everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Prefix(u64);

impl Prefix {
    /// The empty beginning of requests without an adapter.
    pub(crate) const ROOT: Self = Self(0);

    /// The empty beginning: keys and values depend on the adapter, so each has its own. Other names count from
    /// below.
    pub(crate) fn root(adapter: Option<usize>) -> Self {
        adapter.map_or(Self::ROOT, |adapter| Self(u64::MAX - adapter as u64))
    }
}

/// All pages.
#[derive(Debug)]
pub(crate) struct Pages {
    slots: Vec<Slot>,
    free: Vec<Page>,
    /// Pages that only the index holds, by the time they were given back.
    idle: BTreeMap<u64, Page>,
    time: u64,
    index: Index,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    holders: u32,
    /// Key in `idle`.
    idle_since: u64,
    /// Leading positions that the index may hand out.
    indexed: usize,
    prefixes: Vec<Prefix>,
}

/// What the index knows of a prompt.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Match {
    /// The pages, held for the caller.
    pub(crate) pages: Vec<Page>,
    /// Tokens whose keys and values they hold.
    pub(crate) tokens: usize,
    /// The whole pages' last name.
    pub(crate) prefix: Option<Prefix>,
}

impl Pages {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            slots: vec![Slot::default(); count],
            free: (0..count as Page).rev().collect(),
            idle: BTreeMap::new(),
            time: 0,
            index: Index::default(),
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// How many can be had without taking one from a request.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// A page of one's own; the longest idle prefix is forgotten where none is free.
    pub(crate) fn take(&mut self) -> Option<Page> {
        let page = if let Some(page) = self.free.pop() {
            page
        } else {
            let (_, page) = self.idle.pop_first()?;
            self.forget(page);
            page
        };
        self.slots[page as usize].holders = 1;
        Some(page)
    }

    /// One more holder.
    pub(crate) fn hold(&mut self, page: Page) {
        let slot = &mut self.slots[page as usize];
        if slot.holders == 0 {
            self.idle.remove(&slot.idle_since);
        }
        slot.holders += 1;
    }

    /// One holder less. The last one's page stays idle where the index knows it.
    pub(crate) fn release(&mut self, page: Page) {
        let slot = &mut self.slots[page as usize];
        slot.holders = slot.holders.saturating_sub(1);
        if slot.holders > 0 {
            return;
        }
        if slot.prefixes.is_empty() {
            self.free.push(page);
        } else {
            self.time += 1;
            slot.idle_since = self.time;
            self.idle.insert(self.time, page);
        }
    }

    /// Gives all of a sequence's pages back, the last first: it is the first to be forgotten.
    pub(crate) fn release_all(&mut self, pages: &mut Vec<Page>) {
        while let Some(page) = pages.pop() {
            self.release(page);
        }
    }

    /// Whether a holder may write from position `offset` of the page on.
    pub(crate) fn writable(&self, page: Page, offset: usize) -> bool {
        let slot = &self.slots[page as usize];
        slot.holders == 1 && offset >= slot.indexed
    }

    /// The longest indexed beginning of `tokens` after `root`, at most `limit` tokens of it; its pages are held.
    pub(crate) fn find(&mut self, root: Prefix, tokens: &[u32], limit: usize) -> Match {
        let mut found = Match::default();
        let mut parent = root;
        while found.tokens < limit {
            let rest = &tokens[found.tokens..limit];
            let Some((prefix, page, common)) = self.index.best(parent, rest) else { break };
            self.hold(page);
            found.pages.push(page);
            found.tokens += common;
            if common < PAGE {
                break;
            }
            parent = prefix;
            found.prefix = Some(prefix);
        }
        found
    }

    /// How many leading tokens of `tokens` the index knows after `root`, at most `limit`.
    pub(crate) fn known(&self, root: Prefix, tokens: &[u32], limit: usize) -> usize {
        let (mut known, mut parent) = (0, root);
        while known < limit {
            let Some((prefix, _, common)) = self.index.best(parent, &tokens[known..limit]) else { break };
            known += common;
            if common < PAGE {
                break;
            }
            parent = prefix;
        }
        known
    }

    /// Tells the index that `page` holds `tokens` (at most a page of them) after `parent`. Returns their
    /// name; another page's, where the index knows the same beginning already.
    pub(crate) fn publish(&mut self, parent: Prefix, tokens: &[u32], page: Page) -> Prefix {
        if let Some(known) = self.index.exact(parent, tokens) {
            return known;
        }
        let prefix = self.index.insert(parent, tokens, page);
        let slot = &mut self.slots[page as usize];
        slot.indexed = slot.indexed.max(tokens.len());
        slot.prefixes.push(prefix);
        prefix
    }

    /// Empties the index: what it alone held is free.
    pub(crate) fn forget_all(&mut self) {
        self.index = Index { last: self.index.last, ..Index::default() };
        for slot in &mut self.slots {
            slot.indexed = 0;
            slot.prefixes.clear();
        }
        self.free.extend(std::mem::take(&mut self.idle).into_values());
    }

    fn forget(&mut self, page: Page) {
        let slot = &mut self.slots[page as usize];
        slot.indexed = 0;
        for prefix in std::mem::take(&mut slot.prefixes) {
            self.index.remove(prefix);
        }
    }

    /// Pages that somebody holds.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.slots.iter().filter(|slot| slot.holders > 0).count()
    }
}

/// A tree of runs of tokens, each on one page. Names are never used twice, so that a run whose parent
/// was forgotten is never found again.
#[derive(Debug, Default)]
struct Index {
    runs: HashMap<Prefix, Run>,
    /// Runs by what is before them and by their first token.
    children: HashMap<(Prefix, u32), Vec<Prefix>>,
    last: u64,
}

#[derive(Debug)]
struct Run {
    parent: Prefix,
    tokens: Box<[u32]>,
    page: Page,
}

impl Index {
    fn runs_after(&self, parent: Prefix, tokens: &[u32]) -> impl Iterator<Item = (Prefix, &Run)> {
        let children = tokens.first().and_then(|&first| self.children.get(&(parent, first)));
        children.into_iter().flatten().filter_map(|prefix| Some((*prefix, self.runs.get(prefix)?)))
    }

    /// The run after `parent` that has most tokens in common with the beginning of `tokens`.
    fn best(&self, parent: Prefix, tokens: &[u32]) -> Option<(Prefix, Page, usize)> {
        let common = |run: &Run| run.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let runs = self.runs_after(parent, tokens).map(|(prefix, run)| (prefix, run.page, common(run)));
        runs.fold(None, |best: Option<(Prefix, Page, usize)>, run| match best {
            Some(best) if best.2 >= run.2 => Some(best),
            _ => Some(run),
        })
    }

    fn exact(&self, parent: Prefix, tokens: &[u32]) -> Option<Prefix> {
        self.runs_after(parent, tokens).find(|(_, run)| *run.tokens == *tokens).map(|(prefix, _)| prefix)
    }

    fn insert(&mut self, parent: Prefix, tokens: &[u32], page: Page) -> Prefix {
        self.last += 1;
        let prefix = Prefix(self.last);
        if let Some(&first) = tokens.first() {
            self.children.entry((parent, first)).or_default().push(prefix);
            self.runs.insert(prefix, Run { parent, tokens: tokens.into(), page });
        }
        prefix
    }

    fn remove(&mut self, prefix: Prefix) {
        let Some(run) = self.runs.remove(&prefix) else { return };
        let Some(&first) = run.tokens.first() else { return };
        let key = (run.parent, first);
        if let Some(siblings) = self.children.get_mut(&key) {
            siblings.retain(|&sibling| sibling != prefix);
            if siblings.is_empty() {
                self.children.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(len: usize) -> Vec<u32> {
        (0..len as u32).collect()
    }

    #[test]
    fn a_published_beginning_is_found_and_held() {
        let mut pages = Pages::new(4);
        let prompt = tokens(PAGE + 5);
        let (first, second) = (pages.take().unwrap(), pages.take().unwrap());
        let whole = pages.publish(Prefix::ROOT, &prompt[..PAGE], first);
        pages.publish(whole, &prompt[PAGE..], second);
        pages.release_all(&mut vec![first, second]);
        assert_eq!(pages.available(), 4);

        let found = pages.find(Prefix::ROOT, &prompt, prompt.len() - 1);
        assert_eq!((found.pages.as_slice(), found.tokens), ([first, second].as_slice(), PAGE + 4));
        assert_eq!(found.prefix, Some(whole));
        assert_eq!((pages.held(), pages.available()), (2, 2));
        assert!(!pages.writable(second, 4) && pages.writable(second, 5), "the index may hand 5 out");

        let mut other = prompt.clone();
        other[3] = 99;
        assert_eq!(pages.known(Prefix::ROOT, &other, other.len()), 3);
        assert_eq!(pages.known(Prefix::ROOT, &[7], 1), 0);
    }

    #[test]
    fn the_longest_idle_beginning_is_forgotten_first() {
        let mut pages = Pages::new(2);
        for start in [100, 200] {
            let page = pages.take().unwrap();
            pages.publish(Prefix::ROOT, &[start, 1], page);
            pages.release(page);
        }
        assert_eq!(pages.find(Prefix::ROOT, &[100, 1, 5], 2).pages.len(), 1, "in use again: not idle");
        assert!(pages.take().is_some());
        assert_eq!(
            (pages.known(Prefix::ROOT, &[200, 1], 2), pages.known(Prefix::ROOT, &[100, 1], 2)),
            (0, 2)
        );
        assert!(pages.take().is_none());
    }

    #[test]
    fn forgetting_all_frees_idle_pages_and_leaves_held_ones() {
        let mut pages = Pages::new(3);
        let (kept, idle) = (pages.take().unwrap(), pages.take().unwrap());
        pages.publish(Prefix::ROOT, &[1], kept);
        pages.publish(Prefix::ROOT, &[2], idle);
        pages.release(idle);
        pages.forget_all();
        assert_eq!((pages.available(), pages.held()), (2, 1));
        assert_eq!(pages.known(Prefix::ROOT, &[1], 1) + pages.known(Prefix::ROOT, &[2], 1), 0);
        pages.release(kept);
        assert_eq!(pages.available(), 3);
    }
}
