//! Tests through the public interface.

mod assets;
mod bad_input;
mod chat_golden;
mod datasets;
mod gguf_metadata;
mod loading;
mod parquet_files;
mod scene;
mod sentencepiece;
mod tokenizing;
