//! Layers over the [`denoised_tensor::Backend`] contract: names and shapes of weights, and the ops in which they are used.
//!
//! A layer is declared once, from its place in the checkpoint; it then holds only positions in the list of weights, so that the same
//! structure serves before and after loading, on every device. Knows nothing of devices, families or files.
//!
//! R1. Names are those of diffusers' and transformers' modules.
//! R2. A layer declares everything it will use; nothing is looked up by name later.
//! R3. Activations are NHWC or `[batch, tokens, channels]`; a forward allocates its output unless it is told where to write.
#![forbid(unsafe_code)]

mod attention;
mod context;
mod conv;
mod declare;
mod embed;
mod feed_forward;
mod linear;
mod norm;
mod resnet;
mod transformer;

pub use attention::{Attend, attend, split};
pub use context::Ctx;
pub use conv::Conv2d;
pub use declare::{Declare, Scope, WeightIdx};
pub use embed::{Embedding, Parameter, TimestepEmbedding, TwoLayer};
pub use feed_forward::{FeedForward, GatedFeedForward};
pub use linear::{After, Linear};
pub use norm::{GroupNorm, LayerNorm, RmsNorm, modulated_norm, modulated_norm_into};
pub use resnet::{Downsample, ResnetBlock, ResnetSpec, SpatialAttention, Upsample};
pub use transformer::{Transformer2d, Transformer2dSpec};

/// Result of a forward.
pub type Result<T, E = denoised_tensor::TensorError> = std::result::Result<T, E>;
