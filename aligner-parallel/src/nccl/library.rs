//! NCCL's calls. Nothing here waits: what has begun is looked after by whoever began it.

use std::ffi::CStr;
use std::ptr::null;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aligner_core::{Error, Reduce, Result};
use cudarc::nccl::sys;
use sys::{ncclDataType_t as DataType, ncclRedOp_t as Operation, ncclResult_t as Code};

use crate::call::Element;

/// Of NCCL's versions, the first that can begin without waiting: 2.14.
const OLDEST: i32 = 21_400;

/// What went right, or what went wrong in words.
pub(super) type Told<T> = std::result::Result<T, String>;

/// Words of an [`Id`].
pub(super) const ID_WORDS: usize = 16;

/// What ranks that form a communicator of NCCL's have in common; one of them makes it.
pub(super) type Id = [u64; ID_WORDS];

/// Whether NCCL is there, and new enough.
pub(super) fn check() -> Result<()> {
    // SAFETY: it opens a library, which runs no code of ours.
    if !unsafe { sys::is_culib_present() } {
        let message = "NCCL's library libnccl.so is not found: install NCCL 2.14 or newer. Where there is \
                       libnccl.so.2 alone, put a link to it, called libnccl.so, into a directory of LD_LIBRARY_PATH";
        return Err(Error::setting("device", message));
    }
    let mut version = 0;
    // SAFETY: it writes one number.
    told(unsafe { sys::ncclGetVersion(&raw mut version) }, null_comm())
        .map_err(|text| Error::setting("device", format!("NCCL does not tell its version: {text}")))?;
    if version < OLDEST {
        let message = format!("expected NCCL 2.14 or newer, got version {version}, as NCCL counts");
        return Err(Error::setting("device", message));
    }
    Ok(())
}

/// A new identity for a communicator.
pub(super) fn new_id() -> Told<Id> {
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: it writes one identity.
    told(unsafe { sys::ncclGetUniqueId(&raw mut id) }, null_comm())?;
    let bytes = id.internal.map(|byte| byte as u8);
    Ok(bytemuck::cast(bytes))
}

fn null_comm() -> sys::ncclComm_t {
    std::ptr::null_mut()
}

/// Fine, or what NCCL says of it; what is still going on is fine.
fn told(code: Code, comm: sys::ncclComm_t) -> Told<()> {
    if matches!(code, Code::ncclSuccess | Code::ncclInProgress) {
        return Ok(());
    }
    let text = |text: *const std::ffi::c_char| {
        // SAFETY: NCCL gives texts of its own that last, or none.
        if text.is_null() {
            String::new()
        } else {
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        }
    };
    // SAFETY: any code may be asked for, and a communicator that exists, or none.
    let (what, last) = unsafe { (text(sys::ncclGetErrorString(code)), text(sys::ncclGetLastError(comm))) };
    Err(if last.is_empty() { what } else { format!("{what}: {last}") })
}

/// NCCL's name of a type.
fn data_type(element: Element) -> DataType {
    match element {
        Element::F32 => DataType::ncclFloat32,
        Element::F64 => DataType::ncclFloat64,
        Element::F16 => DataType::ncclFloat16,
        Element::Bf16 => DataType::ncclBfloat16,
    }
}

fn operation(op: Reduce) -> Operation {
    match op {
        Reduce::Sum => Operation::ncclSum,
        Reduce::Max => Operation::ncclMax,
        Reduce::Mean => Operation::ncclAvg,
    }
}

/// Elements of one type at an address of the device's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) elements: usize,
    pub(super) element: Element,
}

/// One way of elements, from this rank or to it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// To this place.
    To(usize, Span),
    /// From this place.
    From(usize, Span),
}

/// What a communicator is asked to do.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work<'a> {
    AllReduce(Reduce, Span, Span),
    AllGather(Span, Span),
    ReduceScatter(Span, Span),
    /// From this place; the span is what is sent, or where it comes.
    Broadcast(usize, Span),
    /// All of them at once.
    Ways(&'a [Way]),
}

/// A communicator of NCCL's. It begins what it is asked for, and waits for nothing.
pub(super) struct Comm(Mutex<Option<Open>>);

/// A communicator that has not been given up.
struct Open(sys::ncclComm_t);

// SAFETY: the handle belongs to no thread, and is used by one at a time, under the lock.
unsafe impl Send for Open {}

impl Comm {
    /// Begins to form a communicator of `size` ranks, as the one at `place`, on the thread's device.
    pub(super) fn begin(id: Id, size: usize, place: usize) -> Told<Self> {
        let bytes: [u8; 128] = bytemuck::cast(id);
        let id = sys::ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) };
        let mut config = config();
        let mut comm = null_comm();
        // SAFETY: NCCL writes one handle, and reads a configuration whose size stands in it.
        let code = unsafe {
            sys::ncclCommInitRankConfig(&raw mut comm, size as i32, id, place as i32, &raw mut config)
        };
        told(code, null_comm())?;
        Ok(Self(Mutex::new(Some(Open(comm)))))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, work: impl FnOnce(sys::ncclComm_t) -> Told<R>) -> Told<R> {
        match &*self.lock() {
            Some(Open(comm)) => work(*comm),
            None => Err("the communicator has been given up".into()),
        }
    }

    /// Whether nothing that NCCL has to do on the host is still going on.
    pub(super) fn is_ready(&self) -> Told<bool> {
        self.with(|comm| {
            let mut state = Code::ncclSuccess;
            // SAFETY: the communicator exists, and NCCL writes one code.
            told(unsafe { sys::ncclCommGetAsyncError(comm, &raw mut state) }, comm)?;
            told(state, comm)?;
            Ok(state == Code::ncclSuccess)
        })
    }

    /// Begins some work on a stream.
    ///
    /// # Safety
    /// The spans are those of memory that is there, and that nobody else uses, until the work is done.
    pub(super) unsafe fn work(&self, work: Work<'_>, stream: u64) -> Told<()> {
        let stream = stream as sys::cudaStream_t;
        self.with(|comm| {
            let code = match work {
                Work::AllReduce(op, from, to) => {
                    let (element, op) = (data_type(from.element), operation(op));
                    // SAFETY: as the caller promises.
                    unsafe {
                        sys::ncclAllReduce(from.at(), to.at(), from.elements, element, op, comm, stream)
                    }
                }
                Work::AllGather(from, to) => {
                    let element = data_type(from.element);
                    // SAFETY: as the caller promises.
                    unsafe { sys::ncclAllGather(from.at(), to.at(), from.elements, element, comm, stream) }
                }
                Work::ReduceScatter(from, to) => {
                    let (element, op) = (data_type(from.element), Operation::ncclSum);
                    // SAFETY: as the caller promises.
                    unsafe {
                        sys::ncclReduceScatter(from.at(), to.at(), to.elements, element, op, comm, stream)
                    }
                }
                Work::Broadcast(root, span) => {
                    let (element, root) = (data_type(span.element), root as i32);
                    // SAFETY: as the caller promises; a span may be both ends.
                    unsafe {
                        sys::ncclBroadcast(span.at(), span.at(), span.elements, element, root, comm, stream)
                    }
                }
                // SAFETY: as the caller promises.
                Work::Ways(ways) => return unsafe { go(ways, comm, stream) },
            };
            told(code, comm)
        })
    }

    /// Begins to end in order; the communicator is closed once it is ready again.
    pub(super) fn finalize(&self) -> Told<()> {
        // SAFETY: the communicator exists.
        self.with(|comm| told(unsafe { sys::ncclCommFinalize(comm) }, comm))
    }

    /// Gives back what is left of a communicator that has been finalized.
    pub(super) fn close(&self) {
        if let Some(Open(comm)) = self.lock().take() {
            // SAFETY: the communicator exists, and nobody has it any more. What goes wrong harms nothing now.
            let _ = unsafe { sys::ncclCommDestroy(comm) };
        }
    }

    /// Ends at once whatever goes on. Nobody can use it after.
    pub(super) fn abort(&self) {
        if let Some(Open(comm)) = self.lock().take() {
            // SAFETY: as in `close`.
            let _ = unsafe { sys::ncclCommAbort(comm) };
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}

impl Span {
    fn at(self) -> *mut std::ffi::c_void {
        self.address as *mut std::ffi::c_void
    }
}

/// Begins all ways as one group, without which two that need each other would wait in vain.
///
/// # Safety
/// As [`Comm::work`].
unsafe fn go(ways: &[Way], comm: sys::ncclComm_t, stream: sys::cudaStream_t) -> Told<()> {
    // SAFETY: a group is of this thread, and is ended below, whatever happens between.
    told(unsafe { sys::ncclGroupStart() }, comm)?;
    let mut begun = Ok(());
    for way in ways {
        let code = match *way {
            Way::To(place, span) => {
                let element = data_type(span.element);
                // SAFETY: as the caller promises.
                unsafe { sys::ncclSend(span.at(), span.elements, element, place as i32, comm, stream) }
            }
            Way::From(place, span) => {
                let element = data_type(span.element);
                // SAFETY: as the caller promises.
                unsafe { sys::ncclRecv(span.at(), span.elements, element, place as i32, comm, stream) }
            }
        };
        begun = begun.and_then(|()| told(code, comm));
    }
    // SAFETY: the group has been started above.
    let ended = told(unsafe { sys::ncclGroupEnd() }, comm);
    begun.and(ended)
}

/// Calls that do not wait, and NCCL's own choice in all else: its mark for that is the least number, where
/// zero would be a value.
fn config() -> sys::ncclConfig_t {
    const OPEN: i32 = i32::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 23_000,
        blocking: 0,
        cgaClusterSize: OPEN,
        minCTAs: OPEN,
        maxCTAs: OPEN,
        netName: null(),
        splitShare: OPEN,
        trafficClass: OPEN,
        commName: null(),
        collnetEnable: OPEN,
        CTAPolicy: OPEN,
        shrinkShare: OPEN,
        nvlsCTAs: OPEN,
        nChannelsPerNetPeer: OPEN,
        nvlinkCentricSched: OPEN,
        graphUsageMode: OPEN,
        numRmaCtx: OPEN,
        maxP2pPeers: OPEN,
    }
}
