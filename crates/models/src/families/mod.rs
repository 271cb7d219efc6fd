//! The family table: which pipeline class is made of which components, with which defaults.

mod components;
mod dit;
mod flux;
mod flux2;
mod pixart;
mod qwen_image;
mod schedulers;
mod sd;
mod sd3;
mod sdxl;
mod wan;
mod zimage;

use crate::{ModelError, diffusion::DiffusionModel, parts::Opened, pipeline::Model};
use denoised_checkpoint::Folder;
use std::path::Path;

/// One row of the table.
struct Family {
    /// `_class_name` in `model_index.json`.
    pipeline_class: &'static str,
    /// Reads configs and declares weights.
    open: fn(&Folder) -> Result<Opened, ModelError>,
}

const FAMILIES: &[Family] = &[
    Family {
        pipeline_class: "DiTPipeline",
        open: dit::open,
    },
    Family {
        pipeline_class: "Flux2KleinPipeline",
        open: flux2::open,
    },
    Family {
        pipeline_class: "FluxImg2ImgPipeline",
        open: flux::open,
    },
    Family {
        pipeline_class: "FluxInpaintPipeline",
        open: flux::open,
    },
    Family {
        pipeline_class: "FluxKontextPipeline",
        open: flux::open,
    },
    Family {
        pipeline_class: "FluxPipeline",
        open: flux::open,
    },
    Family {
        pipeline_class: "LatentConsistencyModelPipeline",
        open: sd::open,
    },
    Family {
        pipeline_class: "PixArtAlphaPipeline",
        open: pixart::open_alpha,
    },
    Family {
        pipeline_class: "PixArtSigmaPipeline",
        open: pixart::open_sigma,
    },
    Family {
        pipeline_class: "QwenImagePipeline",
        open: qwen_image::open,
    },
    Family {
        pipeline_class: "QwenImageEditPipeline",
        open: qwen_image::open_edit,
    },
    Family {
        pipeline_class: "QwenImageEditPlusPipeline",
        open: qwen_image::open_edit_plus,
    },
    Family {
        pipeline_class: "StableDiffusionPipeline",
        open: sd::open,
    },
    Family {
        pipeline_class: "StableDiffusionImg2ImgPipeline",
        open: sd::open,
    },
    Family {
        pipeline_class: "StableDiffusionInpaintPipeline",
        open: sd::open,
    },
    Family {
        pipeline_class: "StableDiffusionXLPipeline",
        open: sdxl::open,
    },
    Family {
        pipeline_class: "StableDiffusionXLImg2ImgPipeline",
        open: sdxl::open,
    },
    Family {
        pipeline_class: "StableDiffusionXLInpaintPipeline",
        open: sdxl::open,
    },
    Family {
        pipeline_class: "StableDiffusion3Pipeline",
        open: sd3::open,
    },
    Family {
        pipeline_class: "StableDiffusion3Img2ImgPipeline",
        open: sd3::open,
    },
    Family {
        pipeline_class: "StableDiffusion3InpaintPipeline",
        open: sd3::open,
    },
    Family {
        pipeline_class: "WanPipeline",
        open: wan::open,
    },
    Family {
        pipeline_class: "WanImageToVideoPipeline",
        open: wan::open_image_to_video,
    },
    Family {
        pipeline_class: "ZImagePipeline",
        open: zimage::open,
    },
    Family {
        pipeline_class: "ZImageImg2ImgPipeline",
        open: zimage::open,
    },
    Family {
        pipeline_class: "ZImageInpaintPipeline",
        open: zimage::open,
    },
];

/// Reads a checkpoint's configs and index; touches no weight and needs no device.
///
/// # Errors
/// [`ModelError`] naming the file: not a checkpoint, an unknown class, a setting or a tensor that nothing here understands, or one that
/// is missing.
pub fn open(path: &Path) -> Result<Box<dyn Model>, ModelError> {
    let folder = Folder::open(path)?;
    let class = folder.pipeline_class();
    let Some(family) = FAMILIES.iter().find(|family| family.pipeline_class == class) else {
        return Err(ModelError::UnknownPipeline {
            path: path.join("model_index.json"),
            class: class.to_owned(),
            known: FAMILIES.iter().map(|family| family.pipeline_class).collect(),
        });
    };
    Ok(Box::new(DiffusionModel::new((family.open)(&folder)?)))
}

/// Refuses a component whose class is not one of `known`.
fn expect_class(
    folder: &Folder,
    component: &str,
    role: &'static str,
    known: &[&str],
) -> Result<(), ModelError> {
    match folder.class(component) {
        Some(class) if !known.contains(&class.class.as_str()) => Err(ModelError::UnsupportedComponent {
            path: folder.path().join(component),
            role,
            class: class.class.clone(),
            expected: format!("{} is", known.join(" or ")),
        }),
        // A missing component is reported by whoever reads its config.
        _ => Ok(()),
    }
}
