//! A diffusers folder on disk as configs and one name-to-tensor view of its weights.
//!
//! [`Folder`] reads `model_index.json` and hands out [`Config`]s and [`Component`]s; [`Weights`] joins the components of
//! a pipeline under names `<component>/<tensor name>`, so that a whole model is one
//! [`denoised_tensor::Backend::prepare`].
//!
//! Knows nothing of layers, families or devices: which pipeline class is which family, which key means what and which
//! tensor goes where is said by `models`.
//!
//! ```no_run
//! # fn main() -> Result<(), denoised_checkpoint::CheckpointError> {
//! let folder = denoised_checkpoint::Folder::open("emoji-dit".as_ref())?;
//! let config = folder.config("transformer")?;
//! let (n_layers, patch) = (config.usize("num_layers")?, config.usize_or("patch_size", 2)?);
//! config.deny_unread(&["sample_size"])?;
//! let weights = folder.weights(&["text_encoder", "transformer", "vae"])?;
//! println!("{n_layers} {patch} {:?}", weights.shape("transformer/proj_out.bias"));
//! # Ok(())
//! # }
//! ```
//!
//! - Everything on disk is untrusted: every length is compared with a limit or with the file before it is used, and
//!   damage of any kind is a [`CheckpointError`] that names the file, never a panic and never a silently wrong tensor.
//! - Pickle files are never opened, because reading one runs code; the error says how to convert it.
//! - Nothing here writes, and nothing reads outside the folder except through symbolic links that its owner put there
//!   (hub caches are made of them).
#![forbid(unsafe_code)]

mod folder;

mod component;
mod config;
mod reading;
mod safetensors;

mod error;
mod json;

pub use component::{Component, Weights};
pub use config::Config;
pub use error::{CheckpointError, NameList};
pub use folder::{ComponentClass, Folder};
pub use reading::Reading;
pub use safetensors::{FileDType, FormatError, RawTensor, SafeTensors, TensorInfo};
