//! What the device can do at most, as measured: products, and memory.

use std::time::Instant;

use aligner_core::{Device, Result, Tensor};
use burn::tensor::DType;
use serde_json::json;

/// The most that a device does in a second.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Roofline {
    /// Floating-point operations of a large product in f32.
    pub(crate) flops_f32: f64,
    /// The same in bf16.
    pub(crate) flops_bf16: f64,
    /// Bytes of a large tensor read or written.
    pub(crate) bytes_per_second: f64,
}

/// Measures it with products of `side` squared and a tensor of `elements`.
///
/// # Errors
/// A failure of the device.
pub(crate) fn measure(device: &Device, products: &[&str], side: usize, elements: usize) -> Result<Roofline> {
    let product = |dtype| -> Result<f64> {
        let x = Tensor::<2>::ones([side, side], device).cast(dtype);
        let seconds = best(|| wait(&x.clone().matmul(x.clone())))?;
        Ok(2.0 * (side as f64).powi(3) / seconds)
    };
    let flops_f32 = product(DType::F32)?;
    let flops_bf16 = if products.contains(&"bf16") { product(DType::BF16)? } else { f64::NAN };
    let x = Tensor::<1>::ones([elements], device);
    let seconds = best(|| {
        // Read once, written once.
        let moved = x.clone() + 1.0;
        wait(&moved.unsqueeze::<2>())
    })?;
    let bytes_per_second = (2 * 4 * elements) as f64 / seconds;
    println!(
        "{}",
        json!({
            "roofline": device_name(device), "tflops_f32": flops_f32 / 1e12, "tflops_bf16": flops_bf16 / 1e12,
            "gb_per_second": bytes_per_second / 1e9,
        })
    );
    Ok(Roofline { flops_f32, flops_bf16, bytes_per_second })
}

fn device_name(device: &Device) -> String {
    format!("{:?}", device.as_dispatch())
}

/// Ends when the device has computed the tensor: one element of it is read.
fn wait(x: &Tensor<2>) -> Result<()> {
    let one = x.clone().slice([0..1, 0..1]).into_data();
    drop(one);
    Ok(())
}

/// The least seconds of several runs, after one that compiles.
fn best(run: impl Fn() -> Result<()>) -> Result<f64> {
    run()?;
    let mut least = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        run()?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(least)
}
