//! A library in the place of NCCL: ranks are threads, memory is the host's, a stream is the address of a number of
//! pieces of work that are not done. `cargo xtask nccl` compiles it as `libnccl.so`.
//!
//! As in NCCL, nothing waits in a call; what is begun on a communicator is done in its order, each piece when all ranks
//! that it needs have come to it; sends and receives that need each other have to be in one group.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

const FLOAT32: c_int = 7;
const FLOAT64: c_int = 8;

/// So many elements are never summed: as where a device hangs.
const HANGS: usize = 12_345;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id([u8; 128]);

/// What begins NCCL's configuration.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
}

pub struct Comm {
    id: u64,
    place: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    AllReduce(c_int),
    AllGather,
    ReduceScatter,
    Broadcast(usize),
    Send(usize),
    Recv(usize),
}

#[derive(Clone, Copy)]
struct Piece {
    kind: Kind,
    from: usize,
    to: usize,
    count: usize,
    dtype: c_int,
    is_done: bool,
}

/// What is begun at once, on a stream.
struct Launch {
    pieces: Vec<Piece>,
    stream: usize,
}

#[derive(Default)]
struct Group {
    size: usize,
    joined: usize,
    /// By place: in order; only the first is at work.
    launches: Vec<VecDeque<Launch>>,
    error: c_int,
}

static GROUPS: LazyLock<Mutex<HashMap<u64, Group>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Of the group of calls that is open on this thread: how many times, and what is in it.
    static OPEN: RefCell<(usize, Vec<(usize, Piece, usize)>)> = const { RefCell::new((0, Vec::new())) };
}

fn groups() -> MutexGuard<'static, HashMap<u64, Group>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pending(stream: usize) -> &'static AtomicU64 {
    unsafe { &*(stream as *const AtomicU64) }
}

fn width(dtype: c_int) -> usize {
    if dtype == FLOAT64 { 8 } else { 4 }
}

fn read(address: usize, count: usize, dtype: c_int) -> Vec<f64> {
    let at = |i: usize| unsafe {
        if dtype == FLOAT64 { *(address as *const f64).add(i) } else { f64::from(*(address as *const f32).add(i)) }
    };
    (0..count).map(at).collect()
}

fn write(address: usize, values: &[f64], dtype: c_int) {
    for (i, &value) in values.iter().enumerate() {
        unsafe {
            if dtype == FLOAT64 {
                *(address as *mut f64).add(i) = value;
            } else {
                *(address as *mut f32).add(i) = value as f32;
            }
        }
    }
}

fn reduce(all: &[Vec<f64>], op: c_int, dtype: c_int) -> Vec<f64> {
    let round = |value: f64| if dtype == FLOAT64 { value } else { f64::from(value as f32) };
    let element = |i: usize| {
        let values = all.iter().map(|values| values[i]);
        match op {
            // The maximum of NCCL passes over what is no number.
            2 => values.fold(f64::NEG_INFINITY, f64::max),
            op => {
                let sum = values.reduce(|sum, value| round(sum + value)).unwrap_or_default();
                if op == 4 { round(sum / all.len() as f64) } else { sum }
            }
        }
    };
    (0..all[0].len()).map(element).collect()
}

impl Group {
    /// Does all work whose ranks have come.
    fn progress(&mut self) {
        while self.error == SUCCESS && (self.collective() || self.ways()) {}
    }

    /// A collective that all have come to.
    fn collective(&mut self) -> bool {
        let firsts: Option<Vec<Piece>> =
            self.launches.iter().map(|launches| launches.front().map(|launch| launch.pieces[0])).collect();
        let Some(pieces) = firsts else { return false };
        let one = pieces[0];
        if pieces.iter().any(|piece| matches!(piece.kind, Kind::Send(_) | Kind::Recv(_))) {
            return false;
        }
        if pieces.iter().any(|piece| (piece.kind, piece.count, piece.dtype) != (one.kind, one.count, one.dtype)) {
            // NCCL would hang, or worse.
            self.error = INVALID_USAGE;
            return false;
        }
        if one.count == HANGS {
            return false;
        }
        let (count, dtype, size) = (one.count, one.dtype, self.size);
        let read_all = |count: usize| -> Vec<Vec<f64>> {
            pieces.iter().map(|piece| read(piece.from, count, dtype)).collect()
        };
        match one.kind {
            Kind::AllReduce(op) => {
                let sum = reduce(&read_all(count), op, dtype);
                pieces.iter().for_each(|piece| write(piece.to, &sum, dtype));
            }
            Kind::AllGather => {
                let all = read_all(count).concat();
                pieces.iter().for_each(|piece| write(piece.to, &all, dtype));
            }
            Kind::ReduceScatter => {
                let sum = reduce(&read_all(count * size), 0, dtype);
                for (place, piece) in pieces.iter().enumerate() {
                    write(piece.to, &sum[place * count..][..count], dtype);
                }
            }
            Kind::Broadcast(root) => {
                let values = read(pieces[root].from, count, dtype);
                pieces.iter().for_each(|piece| write(piece.to, &values, dtype));
            }
            Kind::Send(_) | Kind::Recv(_) => {}
        }
        for launches in &mut self.launches {
            end(launches);
        }
        true
    }

    /// A send and a receive that have come to each other.
    fn ways(&mut self) -> bool {
        for from in 0..self.size {
            for to in 0..self.size {
                let find = |launches: &VecDeque<Launch>, kind: Kind| {
                    let pieces = &launches.front()?.pieces;
                    pieces.iter().position(|piece| piece.kind == kind && !piece.is_done)
                };
                let sends = find(&self.launches[from], Kind::Send(to));
                let (Some(send), Some(recv)) = (sends, find(&self.launches[to], Kind::Recv(from))) else {
                    continue;
                };
                let (sent, received) =
                    (self.launches[from][0].pieces[send], self.launches[to][0].pieces[recv]);
                if (sent.count, sent.dtype) != (received.count, received.dtype) {
                    self.error = INVALID_USAGE;
                    return false;
                }
                write(received.to, &read(sent.from, sent.count, sent.dtype), sent.dtype);
                self.launches[from][0].pieces[send].is_done = true;
                self.launches[to][0].pieces[recv].is_done = true;
                for place in [from, to] {
                    let launches = &mut self.launches[place];
                    if launches.front().is_some_and(|launch| launch.pieces.iter().all(|piece| piece.is_done)) {
                        end(launches);
                    }
                }
                return true;
            }
        }
        false
    }
}

/// The first launch is done.
fn end(launches: &mut VecDeque<Launch>) {
    if let Some(launch) = launches.pop_front() {
        pending(launch.stream).fetch_sub(1, Ordering::Release);
    }
}

/// Begins a piece, or keeps it until its group ends.
fn begin(comm: *mut Comm, kind: Kind, from: usize, to: usize, count: usize, dtype: c_int, stream: usize) -> c_int {
    if comm.is_null() || stream == 0 || !matches!(dtype, FLOAT32 | FLOAT64) {
        return INVALID_ARGUMENT;
    }
    debug_assert!(width(dtype) > 0);
    let piece = Piece { kind, from, to, count, dtype, is_done: false };
    let is_kept = OPEN.with_borrow_mut(|(depth, kept)| {
        if *depth > 0 {
            kept.push((comm as usize, piece, stream));
        }
        *depth > 0
    });
    if is_kept { SUCCESS } else { launch(comm, vec![piece], stream) }
}

fn launch(comm: *mut Comm, pieces: Vec<Piece>, stream: usize) -> c_int {
    let comm = unsafe { &*comm };
    let mut groups = groups();
    let Some(group) = groups.get_mut(&comm.id) else { return INVALID_USAGE };
    pending(stream).fetch_add(1, Ordering::AcqRel);
    group.launches[comm.place].push_back(Launch { pieces, stream });
    group.progress();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = 23_000 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> c_int {
    let mut bytes = [7; 128];
    bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_ne_bytes());
    unsafe { *id = Id(bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut *mut Comm,
    size: c_int,
    id: Id,
    place: c_int,
    config: *mut Config,
) -> c_int {
    let config = unsafe { &*config };
    let open = [config.cga_cluster_size, config.min_ctas, config.max_ctas].iter().all(|&value| value == c_int::MIN);
    if config.magic != 0xcafe_beef || config.blocking != 0 || !open || config.size < size_of::<Config>() {
        return INVALID_ARGUMENT;
    }
    let mut number = [0; 8];
    number.copy_from_slice(&id.0[..8]);
    let (id, size, place) = (u64::from_ne_bytes(number), size as usize, place as usize);
    let mut groups = groups();
    let group = groups.entry(id).or_insert_with(|| Group {
        size,
        launches: (0..size).map(|_| VecDeque::new()).collect(),
        ..Group::default()
    });
    if group.size != size || place >= size || group.joined == size {
        return INVALID_ARGUMENT;
    }
    group.joined += 1;
    unsafe { *comm = Box::into_raw(Box::new(Comm { id, place })) };
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, error: *mut c_int) -> c_int {
    let comm = unsafe { &*comm };
    let groups = groups();
    let state = groups.get(&comm.id).map_or(INVALID_USAGE, |group| match group.error {
        SUCCESS if group.joined < group.size => IN_PROGRESS,
        error => error,
    });
    unsafe { *error = state };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> c_int {
    let comm = unsafe { Box::from_raw(comm) };
    if let Some(group) = groups().get_mut(&comm.id) {
        group.error = REMOTE_ERROR;
        while !group.launches[comm.place].is_empty() {
            end(&mut group.launches[comm.place]);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: *mut Comm) -> c_int {
    let comm = unsafe { &*comm };
    let is_done = groups().get(&comm.id).is_some_and(|group| group.launches[comm.place].is_empty());
    if is_done { SUCCESS } else { INVALID_USAGE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> c_int {
    drop(unsafe { Box::from_raw(comm) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    begin(comm, Kind::AllReduce(op), from as usize, to as usize, count, dtype, stream as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    begin(comm, Kind::AllGather, from as usize, to as usize, count, dtype, stream as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    if op != 0 {
        return INVALID_ARGUMENT;
    }
    begin(comm, Kind::ReduceScatter, from as usize, to as usize, count, dtype, stream as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    begin(comm, Kind::Broadcast(root as usize), from as usize, to as usize, count, dtype, stream as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    begin(comm, Kind::Send(peer as usize), from as usize, 0, count, dtype, stream as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> c_int {
    begin(comm, Kind::Recv(peer as usize), 0, to as usize, count, dtype, stream as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    OPEN.with_borrow_mut(|(depth, _)| *depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    let kept = OPEN.with_borrow_mut(|(depth, kept)| {
        *depth -= 1;
        if *depth == 0 { std::mem::take(kept) } else { Vec::new() }
    });
    let Some(&(comm, _, stream)) = kept.first() else { return SUCCESS };
    if kept.iter().any(|&(other, _, on)| (other, on) != (comm, stream)) {
        return INVALID_USAGE;
    }
    launch(comm as *mut Comm, kept.into_iter().map(|(_, piece, _)| piece).collect(), stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote error",
        _ => c"unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: *mut Comm) -> *const c_char {
    c"".as_ptr()
}
