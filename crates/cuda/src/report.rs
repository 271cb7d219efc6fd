//! What kernels find wrong with numbers they are given: told to the host at its next wait.

use crate::{
    device::Device,
    memory::{Memory, Region},
};
use cudarc::driver::result;
use denoised_tensor::{Result, TensorError};
use std::cell::Cell;

/// Ops that report, by the number that kernels know them by.
const OPS: [&str; 2] = ["embedding", "gather_rows"];

/// Two words of device memory: which op found a number out of range first, and the number.
#[derive(Debug)]
pub(crate) struct Reports {
    words: Region,
    /// Whether anything that may report was enqueued since the last look.
    is_pending: Cell<bool>,
}

impl Reports {
    pub(crate) fn new(device: &Device, memory: &Memory) -> Result<Self> {
        let reports = Self {
            words: memory.take(|| "reports of kernels".to_owned(), 8)?,
            is_pending: Cell::new(false),
        };
        reports.clear(device)?;
        Ok(reports)
    }

    /// Where a kernel of `op` reports, and the number it reports under.
    pub(crate) fn place(&self, op: &'static str) -> (u64, i32) {
        self.is_pending.set(true);
        let idx = OPS.iter().position(|own| *own == op);
        (self.words.start(), idx.map_or(0, |idx| idx as i32 + 1))
    }

    /// Fails with what was reported since the last look. Waits only if anything may have been.
    pub(crate) fn look(&self, device: &Device) -> Result<()> {
        if !self.is_pending.replace(false) {
            return Ok(());
        }
        device.enter()?;
        let mut bytes = [0u8; 8];
        // SAFETY: the words are that long.
        let answer = unsafe { result::memcpy_dtoh_async(&mut bytes, self.words.start(), device.stream()) };
        device.check("reading reports", answer)?;
        device.synchronize("reading reports")?;
        let [op, number] =
            [0, 4].map(|i| i32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]));
        if op == 0 {
            return Ok(());
        }
        self.clear(device)?;
        let name = usize::try_from(op - 1).ok().and_then(|idx| OPS.get(idx));
        Err(TensorError::Shape {
            op: name.copied().unwrap_or("a kernel"),
            detail: format!("{number} is no row of the table"),
        })
    }

    fn clear(&self, device: &Device) -> Result<()> {
        // SAFETY: the words are that long.
        let answer = unsafe { result::memset_d8_async(self.words.start(), 0, 8, device.stream()) };
        device.check("clearing reports", answer)
    }
}
