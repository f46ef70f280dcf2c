//! Checks an accelerator against the host, then times it: `check_accelerator cuda|cpu [size] [check …]`, with a size of
//! `tiny`, `small`, `smollm2` or `1b`. Checks that are named run alone. Prints one line for each finding; fails where one
//! is out of bounds.
#![expect(clippy::print_stdout, reason = "the result")]

mod engine;
mod gradients;
mod kernels;
mod meshes;
mod ranks;
mod roofline;
mod shapes;
mod training;

use aligner_core::ops::cube::Accelerator;
use aligner_core::{Device, Error, Result};
use aligner_infer::{EngineDevice, PackedKind};
use serde_json::json;
use shapes::random_model;
use training::{Amount, Place};

/// The names of all checks.
const CHECKS: [&str; 6] = ["kernels", "engine", "gradients", "training", "ranks", "meshes"];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().map_or("cuda", String::as_str);
    let (place, accelerator) = match name {
        "cuda" => (cuda()?, Accelerator::cuda(0)?),
        "cpu" => (cpu()?, Accelerator::cpu()?),
        _ => return Err(Error::setting("device", format!("expected `cuda` or `cpu`, got `{name}`"))),
    };
    println!("{}", json!({"device": name, "memory_bytes": accelerator.memory_bytes()}));
    let (named, sizes): (Vec<&str>, Vec<&str>) =
        arguments.iter().skip(1).map(String::as_str).partition(|argument| CHECKS.contains(argument));
    let small = random_model("tiny", &Device::flex())?;
    // CubeCL's runtime for processors takes minutes for what a GPU does at once.
    let is_slow = place.engine == EngineDevice::CubeCpu;
    let amount = if is_slow { Amount { texts: 2, tokens: 8 } } else { Amount { texts: 4, tokens: 32 } };
    let mut all = true;
    for check in CHECKS.into_iter().filter(|check| named.is_empty() || named.contains(check)) {
        all &= match check {
            "kernels" => kernels::check(&accelerator)?,
            "engine" => engine::check(place.engine)?,
            "gradients" => gradients::check(&place)?,
            "training" => training::check(&small, &place, amount)?,
            "ranks" => ranks::check(&small, &place, amount)? && ranks::check_nccl(&place)?,
            _ => meshes::check(&small, &place)?,
        };
    }
    for size in sizes {
        time(size, &place)?;
    }
    let failed = || Error::Invalid("the accelerator and the host differ, see above".into());
    all.then_some(()).ok_or_else(failed)
}

/// Times training and generation of a model of this size.
fn time(size: &str, place: &Place) -> Result<()> {
    let is_slow = place.engine == EngineDevice::CubeCpu;
    let (side, elements) = if is_slow { (256, 1 << 20) } else { (8192, 1 << 28) };
    let roofline = roofline::measure(&place.device, place.products(), side, elements)?;
    // Parameters on the device are taken by handle.
    let model = random_model(size, &place.device)?;
    let amount = if is_slow { Amount { texts: 2, tokens: 32 } } else { Amount { texts: 16, tokens: 1024 } };
    training::time(&model, place, amount, roofline)?;
    engine::time(&model, place.engine, None, roofline)?;
    engine::time(&model, place.engine, Some(PackedKind::Bf16), roofline)
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Place> {
    Ok(Place { device: Device::cuda(0), engine: EngineDevice::Cuda(0) })
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Place> {
    Err(Error::setting("device", "this program was built without the feature `cuda`"))
}

#[cfg(feature = "cube-cpu")]
fn cpu() -> Result<Place> {
    Ok(Place { device: Device::cpu(), engine: EngineDevice::CubeCpu })
}

#[cfg(not(feature = "cube-cpu"))]
fn cpu() -> Result<Place> {
    Err(Error::setting("device", "this program was built without the feature `cube-cpu`"))
}
