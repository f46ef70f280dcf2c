//! An algorithm whose panics, hangs and wrong shapes become errors with names.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use aligner_core::{Algorithm, Batch, Error, Forward, Group, LossOutput, Needs, Per, Result, StepBatch};

use crate::watchdog::Watchdog;

/// Most samples or groups that a line names.
const NAMED: usize = 16;

/// An algorithm as it is, but that its panics are errors; they name the method, the samples, and what the builder was told.
///
/// The learner puts one around every algorithm. One that knows the algorithm's name and has a [`Watchdog`] goes around it before.
#[derive(Clone)]
pub struct Guarded<'a> {
    algorithm: &'a dyn Algorithm,
    name: Option<&'a str>,
    when: String,
    watchdog: Option<&'a Watchdog>,
}

impl<'a> Guarded<'a> {
    /// The algorithm with a guard; `when` says what it is called for, as `step 3`.
    pub fn new(algorithm: &'a dyn Algorithm, when: impl Into<String>) -> Self {
        Self { algorithm, name: None, when: when.into(), watchdog: None }
    }

    /// The same with the name that its user knows it by.
    #[must_use]
    pub fn named(self, name: &'a str) -> Self {
        Self { name: Some(name), ..self }
    }

    /// The same with a limit on the time of each call of `credit` and `loss`.
    #[must_use]
    pub fn watched(self, watchdog: Option<&'a Watchdog>) -> Self {
        Self { watchdog, ..self }
    }

    /// Calls one of its methods; `on` names what it is given. What went wrong that the algorithm did not report itself is text.
    fn call<T>(&self, method: &str, on: &str, call: impl FnOnce() -> Result<T>) -> Result<Result<T>, String> {
        // What user code leaves behind in its own state when it panics is its own affair.
        let call = || catch_unwind(AssertUnwindSafe(call));
        let returned = match self.watchdog {
            Some(watchdog) => watchdog.watch(format!("{}, on {on},", self.place(method)), call),
            None => call(),
        };
        match returned {
            Ok(Err(error @ Error::Shape { .. })) => Err(format!("failed: {error}")),
            Ok(returned) => Ok(returned),
            Err(panic) => Err(format!("panicked: {}", panic_message(panic.as_ref()))),
        }
    }

    fn place(&self, method: &str) -> String {
        let name =
            self.name.map_or_else(|| "the algorithm".to_string(), |name| format!("algorithm `{name}`"));
        format!("`{method}` of {name} in {}", self.when)
    }

    fn failed(&self, method: &str, said: &str, on: &str) -> Error {
        Error::Invalid(format!("{} {said}; on {on}", self.place(method)))
    }

    /// Ids of the groups on which credit fails in the same words when it is given nothing else.
    fn failing_alone(&self, step: &StepBatch, said: &str) -> Vec<String> {
        if step.comm.as_ref().is_some_and(|comm| comm.size() > 1) {
            // Other ranks do not take part a second time.
            return Vec::new();
        }
        let fails = |group: &&Group| {
            let mut alone = StepBatch { kl_coef: step.kl_coef, ..StepBatch::new(vec![(*group).clone()]) };
            let on = format!("the group {}", group.id);
            self.call("credit", &on, || self.algorithm.credit(&mut alone)).is_err_and(|again| again == said)
        };
        step.groups.iter().filter(fails).map(|group| group.id.clone()).collect()
    }
}

impl Algorithm for Guarded<'_> {
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let on = format!("the samples {}", listed(&batch.sample_ids()));
        let loss = || {
            let loss = self.algorithm.loss(out, batch)?;
            match loss.sum.dims() {
                [1] => Ok(loss),
                dims => Err(Error::shape("the loss's sum", "[1]", &dims)),
            }
        };
        self.call("loss", &on, loss).unwrap_or_else(|said| Err(self.failed("loss", &said, &on)))
    }

    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let all: Vec<String> = step.groups.iter().map(|group| group.id.clone()).collect();
        let on = format!("the groups {}", listed(&all));
        self.call("credit", &on, || self.algorithm.credit(step)).unwrap_or_else(|said| {
            let on = match self.failing_alone(step, &said).as_slice() {
                [] => on,
                some => format!("the groups {}", listed(some)),
            };
            Err(self.failed("credit", &said, &on))
        })
    }

    fn needs(&self) -> Needs {
        self.algorithm.needs()
    }

    fn per(&self) -> Per {
        self.algorithm.per()
    }
}

/// The first few of many names.
fn listed(names: &[String]) -> String {
    match names.len().saturating_sub(NAMED) {
        0 => names.join(", "),
        more => format!("{}, and {more} more", names[..NAMED].join(", ")),
    }
}

/// What a panic said, in one line.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use aligner_core::Sample;

    use super::*;
    use crate::check::BigramPolicy;
    use crate::gradients::gradients;

    /// Fails in one way or another where a sample has token 7.
    #[derive(Clone, Copy)]
    enum Broken {
        LossPanics,
        LossShape,
        OpShape,
        CreditPanics,
    }

    impl Algorithm for Broken {
        fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
            let (logps, hit) = (out.logps()?.clone(), batch.targets.contains(&7));
            match self {
                Self::LossPanics if hit => panic!("no such word"),
                Self::LossShape if hit => Ok(LossOutput::new(logps)),
                Self::OpShape if hit => Ok(LossOutput::new((logps.clone() + logps.repeat(&[2])).sum())),
                _ => Ok(LossOutput::new(logps.sum().neg())),
            }
        }

        fn credit(&self, step: &mut StepBatch) -> Result<()> {
            let tokens =
                step.groups.iter().flat_map(|group| &group.samples).flat_map(|sample| &sample.tokens);
            assert!(
                !matches!(self, Self::CreditPanics) || tokens.into_iter().all(|token| *token != 7),
                "no seven"
            );
            Ok(())
        }
    }

    fn groups() -> Vec<Group> {
        let sample = |token| Sample::response(&[1], &[token, 3]);
        let group = |at: u32| Group {
            id: format!("row {at}"),
            samples: vec![sample(4 + at), sample(5 + at)],
            ..Group::default()
        };
        [0, 2, 5].map(group).to_vec()
    }

    fn guarded(broken: &Broken) -> Guarded<'_> {
        Guarded::new(broken, "step 3").named("mine")
    }

    #[test]
    fn what_goes_wrong_in_loss_names_the_fewest_samples_that_show_it() {
        for (broken, said) in [
            (Broken::LossPanics, "panicked: no such word"),
            (Broken::LossShape, "the loss's sum: expected shape [1], got [2]"),
            (Broken::OpShape, "panicked: "),
        ] {
            let groups = groups();
            let batch = Batch::collate(&groups).expect("valid groups");
            let policy = BigramPolicy::new(12, 1);
            let error = gradients(&policy, &guarded(&broken), &[batch], &groups).expect_err("broken");
            let message = error.to_string();
            assert!(message.starts_with("`loss` of algorithm `mine` in step 3"), "{message}");
            assert!(message.contains(said) && message.ends_with("on the samples row 2#1"), "{message}");
        }
    }

    #[test]
    fn what_goes_wrong_in_credit_names_the_groups_that_show_it() {
        let mut step = StepBatch::new(groups());
        let message = guarded(&Broken::CreditPanics).credit(&mut step).expect_err("broken").to_string();
        let expected = "`credit` of algorithm `mine` in step 3 panicked: no seven; on the groups row 2";
        assert_eq!(message, expected);
    }

    /// Waits for a word before it returns.
    struct Slow(std::sync::Mutex<std::sync::mpsc::Receiver<String>>);

    impl Algorithm for Slow {
        fn loss(&self, out: &Forward, _: &Batch) -> Result<LossOutput> {
            let told = self.0.lock().expect("one thread").recv_timeout(Duration::from_secs(30));
            let part =
                "`loss` of the algorithm in step 1, on the samples a#0, has not returned within 0.02 seconds";
            assert_eq!(told.expect("told"), part);
            Ok(LossOutput::new(out.logps()?.clone().sum()))
        }
    }

    #[test]
    fn a_call_that_hangs_is_told_of_with_its_samples() {
        let (tell, told) = channel();
        let watchdog =
            Watchdog::new(Duration::from_millis(20), move |line| tell.send(line.to_owned()).expect("heard"));
        let slow = Slow(std::sync::Mutex::new(told));
        let guarded = Guarded::new(&slow, "step 1").watched(Some(&watchdog));
        let groups = [Group::single("a", Sample::response(&[1], &[2]))];
        let batch = Batch::collate(&groups).expect("a valid group");
        gradients(&BigramPolicy::new(5, 1), &guarded, &[batch], &groups).expect("it returns in the end");
    }

    #[test]
    fn many_names_are_cut() {
        let names: Vec<String> = (0..20).map(|at| at.to_string()).collect();
        assert!(listed(&names).ends_with("14, 15, and 4 more"));
        assert_eq!(listed(&names[..2]), "0, 1");
    }
}
