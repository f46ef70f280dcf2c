//! What stands in place of accelerators in a build without them: types that nothing can make.

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::ops::rows::PackedKind;
use aligner_core::{Device, Drawn, Error, Result, Sampling};

use crate::config::EngineDevice;
use crate::host::Batch;
use crate::pages::Page;
use crate::weights::Weights;

/// No accelerator.
#[derive(Debug, Clone)]
pub(crate) enum Accelerator {}

impl Accelerator {
    pub(crate) fn memory_bytes(&self) -> usize {
        match *self {}
    }
}

/// None; see the module of the same name.
///
/// # Errors
/// Where one is asked for.
pub(crate) fn choose(device: EngineDevice, _: &Device) -> Result<Option<Accelerator>> {
    match device {
        EngineDevice::Parameters | EngineDevice::Host => Ok(None),
        EngineDevice::Cuda(_) | EngineDevice::CubeCpu => {
            let message = format!("{device:?}: this program was built without accelerators");
            Err(Error::setting("device", message))
        }
    }
}

#[derive(Debug)]
pub(crate) enum DeviceWeights {}

impl DeviceWeights {
    pub(crate) fn new(device: &Accelerator, _: &CausalLm, _: Option<PackedKind>) -> Result<Self> {
        match *device {}
    }

    pub(crate) fn packed_bytes(&self) -> usize {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum DeviceStore {}

impl DeviceStore {
    pub(crate) fn new(weights: &DeviceWeights, _: &ModelConfig, _: usize) -> Self {
        match *weights {}
    }

    pub(crate) fn copy(&mut self, _: Page, _: Page) {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum DeviceLogits {}

pub(crate) fn draws(_: &Sampling) -> bool {
    false
}

impl DeviceLogits {
    pub(crate) fn read(&self) -> Result<Vec<f32>> {
        match *self {}
    }

    pub(crate) fn draw(&self, _: &[Option<(&Sampling, f64)>]) -> Result<Vec<Option<Drawn>>> {
        match *self {}
    }
}

pub(crate) fn forward(_: &Weights, own: &DeviceWeights, _: &DeviceStore, _: &Batch) -> Result<DeviceLogits> {
    match *own {}
}
