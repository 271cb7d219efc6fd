//! The folder of one tokenizer.

use crate::ModelError;
use denoised_checkpoint::Folder;
use serde_json::Value;

/// Vocabulary files have 1 to 16 MiB.
const FILE_LIMIT_BYTES: u64 = 64 << 20;

/// Its files by name; errors name them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Files<'a> {
    pub(super) folder: &'a Folder,
    pub(super) component: &'a str,
}

impl Files<'_> {
    pub(super) fn has(&self, file: &str) -> bool {
        self.folder.file(self.component, file).is_some()
    }

    /// An error of `file`, or of the folder where that is empty.
    pub(super) fn error(&self, file: &str, problem: String) -> ModelError {
        let path = self.folder.path().join(self.component);
        ModelError::Tokenizer {
            path: if file.is_empty() { path } else { path.join(file) },
            problem,
        }
    }

    pub(super) fn bytes(&self, file: &str) -> Result<Vec<u8>, ModelError> {
        Ok(self.folder.read(self.component, file, FILE_LIMIT_BYTES)?)
    }

    pub(super) fn text(&self, file: &str) -> Result<String, ModelError> {
        String::from_utf8(self.bytes(file)?).map_err(|error| self.error(file, error.to_string()))
    }

    pub(super) fn json(&self, file: &str) -> Result<Value, ModelError> {
        serde_json::from_slice(&self.bytes(file)?)
            .map_err(|error| self.error(file, format!("is not valid JSON: {error}")))
    }
}
