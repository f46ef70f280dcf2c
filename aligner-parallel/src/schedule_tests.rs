//! Schedules: complete, free of deadlocks, within their bounds.

use crate::schedule::{PipelineSchedule, Task};
use crate::simulate::{Costs, Work, replay};

const ALL: [PipelineSchedule; 3] =
    [PipelineSchedule::GPipe, PipelineSchedule::OneForwardOneBackward, PipelineSchedule::Interleaved];

/// Every schedule that exists up to 6 stages, 12 micro-batches and 4 chunks.
fn each(mut look: impl FnMut(PipelineSchedule, [usize; 3], &[Vec<Task>])) {
    let mut seen = 0;
    for (stages, micros, chunks) in
        (1..=6).flat_map(|s| (1..=12).map(move |m| (s, m))).flat_map(|(s, m)| (1..=4).map(move |c| (s, m, c)))
    {
        for schedule in ALL {
            if let Ok(tasks) = schedule.tasks(stages, micros, chunks) {
                look(schedule, [stages, micros, chunks], &tasks);
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 2 * 6 * 12 + 3 * (12 + 6 + 4 + 3 + 2 + 2));
}

fn works(tasks: &[Vec<Task>]) -> Vec<Vec<Work>> {
    tasks.iter().map(|tasks| tasks.iter().copied().map(Work::from).collect()).collect()
}

#[test]
fn each_pass_is_done_once_and_backward_after_forward() {
    each(|schedule, [stages, micros, chunks], ranks| {
        assert_eq!(ranks.len(), stages);
        for tasks in ranks {
            assert_eq!(tasks.len(), 2 * micros * chunks, "{schedule:?}");
            for (chunk, micro) in (0..chunks).flat_map(|chunk| (0..micros).map(move |micro| (chunk, micro))) {
                let at = |wanted: Task| {
                    let mut found = tasks.iter().enumerate().filter(|(_, task)| **task == wanted);
                    let first = found.next().expect("the pass is there").0;
                    assert!(found.next().is_none(), "{schedule:?}: {wanted:?} twice");
                    first
                };
                assert!(at(Task::Forward { chunk, micro }) < at(Task::Backward { chunk, micro }));
            }
        }
    });
}

#[test]
fn ranks_that_wait_for_what_they_receive_come_to_the_end() {
    each(|schedule, [stages, micros, chunks], ranks| {
        let costs = Costs::uniform(stages * chunks, 1.0, 2.0, 0.5);
        let timeline = replay(&works(ranks), &costs);
        let timeline =
            timeline.unwrap_or_else(|error| panic!("{schedule:?} {stages} {micros} {chunks}: {error}"));
        for (rank, &held) in timeline.in_flight.iter().enumerate() {
            let bound = schedule.in_flight(rank, stages, micros, chunks);
            assert_eq!(held, bound, "{schedule:?} {stages} {micros} {chunks}: rank {rank}");
        }
    });
}

#[test]
fn in_flight_bounds_are_those_of_the_papers() {
    for rank in 0..4 {
        assert_eq!(PipelineSchedule::GPipe.in_flight(rank, 4, 9, 1), 9);
        assert_eq!(PipelineSchedule::OneForwardOneBackward.in_flight(rank, 4, 9, 1), 4 - rank);
        let interleaved = PipelineSchedule::Interleaved.in_flight(rank, 4, 8, 2);
        assert_eq!(interleaved, 2 * (4 - rank - 1) + 4 + 1);
    }
    assert_eq!(PipelineSchedule::OneForwardOneBackward.in_flight(0, 4, 2, 1), 2);
}

#[test]
fn letters_are_received_in_the_order_of_their_sends() {
    let mut ranks = PipelineSchedule::OneForwardOneBackward.tasks(4, 8, 1).unwrap();
    ranks[1].swap(0, 1);
    let costs = Costs::uniform(4, 1.0, 2.0, 0.0);
    let message = replay(&works(&ranks), &costs).unwrap_err().to_string();
    assert!(message.contains("rank 1 cannot begin forward of micro-batch 1 in chunk 0"), "{message}");
}

#[test]
fn an_order_that_cannot_work_is_found() {
    let mut ranks = PipelineSchedule::OneForwardOneBackward.tasks(4, 8, 1).unwrap();
    let backward = ranks[1].iter().position(|task| matches!(task, Task::Backward { .. })).unwrap();
    ranks[1].swap(0, backward);
    let costs = Costs::uniform(4, 1.0, 2.0, 0.0);
    let message = replay(&works(&ranks), &costs).unwrap_err().to_string();
    assert!(message.contains("rank 1 cannot begin backward of micro-batch 0"), "{message}");
}

#[test]
fn every_reason_is_given_at_once() {
    let message = PipelineSchedule::Interleaved.tasks(4, 6, 1).unwrap_err().to_string();
    assert_eq!(
        message,
        "the schedule interleaved needs at least 2 chunks a rank, got 1; \
         the schedule interleaved needs a multiple of the 4 stages as micro-batches, got 6"
    );
    let message = PipelineSchedule::GPipe.tasks(0, 0, 2).unwrap_err().to_string();
    assert_eq!(message.split("; ").count(), 3, "{message}");
}
