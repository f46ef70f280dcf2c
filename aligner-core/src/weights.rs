//! Weights on disk: Hugging Face safetensors, PEFT's adapters and GGUF, read and written; files of `torch.save`, read.
//!
//! Nothing in a file is believed before it has been checked against the file's own length, so a
//! truncated or hostile file gives an error that names it, and never a panic or a huge allocation.
//! What is written appears whole or not at all ([`atomic_write`]).

mod atomic;
mod checkpoint;
mod checksum;
mod convert;
mod encoding;
mod files;
mod gguf;
mod peft;
mod pytorch;
mod safetensors_file;
mod save;
mod source;
mod unique;
mod unread;
mod whole;

pub use atomic::atomic_write;
pub use checkpoint::Checkpoint;
pub use checksum::checksum;
pub use convert::save_checkpoint;
pub use files::WEIGHT_FILES;
pub use gguf::{Gguf, GgufDtype, GgufValue, gguf_name, save_gguf};
pub use peft::{AdapterCheckpoint, save_adapter};
pub use save::{HostTensor, SaveDtype, read_metadata, read_tensors, save_model, save_tensors};
pub use unread::{Unread, UnreadTensor, open_tensors};
pub use whole::read_whole;
