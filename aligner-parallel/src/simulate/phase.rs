//! A phase of a step, by what its ranks do in it.

use super::Timeline;

/// Seconds of a phase, of which each is one of the parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Which phase.
    pub name: &'static str,
    /// Computing, on the average rank.
    pub compute: f64,
    /// Communication that nothing hides.
    pub communication: f64,
    /// Waiting for other stages of the pipeline.
    pub bubble: f64,
    /// Waiting for data-parallel ranks or engines that have more to do.
    pub waiting: f64,
}

impl Phase {
    /// Nothing yet.
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, compute: 0.0, communication: 0.0, bubble: 0.0, waiting: 0.0 }
    }

    /// A pipeline that has come to its end, whose ranks spent `exchange` of the time that they were busy with exchanges.
    pub(super) fn of_pipeline(name: &'static str, timeline: &Timeline, exchange: f64) -> Self {
        let busy = timeline.busy.iter().sum::<f64>() / timeline.busy.len().max(1) as f64;
        let (compute, bubble) = (busy - exchange, timeline.seconds - busy);
        Self { name, compute, communication: exchange, bubble, waiting: 0.0 }
    }

    /// From its beginning to its end.
    pub fn seconds(&self) -> f64 {
        self.compute + self.communication + self.bubble + self.waiting
    }

    pub(super) fn compute(&mut self, seconds: f64) {
        self.compute += seconds;
    }

    pub(super) fn communicate(&mut self, seconds: f64) {
        self.communication += seconds;
    }

    pub(super) fn wait(&mut self, seconds: f64) {
        self.waiting += seconds;
    }

    /// So many of it.
    #[must_use]
    pub(super) fn times(&self, count: f64) -> Self {
        Self {
            name: self.name,
            compute: count * self.compute,
            communication: count * self.communication,
            bubble: count * self.bubble,
            waiting: count * self.waiting,
        }
    }

    /// What is left of it where `hidden` seconds pass beside another phase.
    #[must_use]
    pub(super) fn beyond(&self, hidden: f64) -> Self {
        let seconds = self.seconds();
        self.times(if seconds > 0.0 { (1.0 - hidden / seconds).max(0.0) } else { 0.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_what_is_hidden_is_taken_from_all() {
        let timeline = Timeline { seconds: 10.0, busy: vec![9.0, 7.0], in_flight: vec![], spans: vec![] };
        let mut phase = Phase::of_pipeline("train", &timeline, 2.0);
        assert_eq!((phase.compute, phase.communication, phase.bubble), (6.0, 2.0, 2.0));
        phase.wait(1.0);
        phase.communicate(0.5);
        phase.compute(0.5);
        assert!((phase.seconds() - 12.0).abs() < 1e-12);
        assert!((phase.times(3.0).seconds() - 36.0).abs() < 1e-12);
        assert!((phase.beyond(9.0).seconds() - 3.0).abs() < 1e-12);
        assert!(phase.beyond(20.0).seconds().abs() < 1e-12);
    }
}
