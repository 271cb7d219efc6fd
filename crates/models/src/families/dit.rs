//! DiT: pictures of a class instead of a text, by a transformer, an autoencoder of 4 channels and noise schedules of discrete timesteps.
//!
//! As in diffusers' `DiTPipeline` there is one size, that of the training. A prompt is the number of a class or one of its labels; the
//! empty prompt stands for no class.

use super::{
    components::{Loading, Sizes, config, expect_equal, kl, model_info},
    schedulers::{self, DiscreteRule, Samplers},
};
use crate::{
    ModelError,
    conditioning::{Conditioner, Conditioning, EncodeArgs, TextOptions, Tokenized},
    denoiser::{ClassTables, Dit, DitConfig},
    layout::TensorLayout,
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks},
};
use denoised_checkpoint::{Config, Folder};
use denoised_nn::{Ctx, Result};
use denoised_sampler::{Ask, Sampler, SamplerError, Schedule};
use denoised_types::{Image, ModelInfo, NamedTensor, Task};
use serde_json::Value;

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 4.0;
/// What the pipeline takes for no class, where there are as many.
const NO_CLASS: u32 = 1000;
/// Labels that a refusal shows.
const N_SHOWN_LABELS: usize = 5;

pub(super) fn open(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    let labels = Labels::read(folder.options())?;
    folder.options().deny_unread(&[])?;
    let classes = ["DiTTransformer2DModel", "Transformer2DModel"];
    let dit = DitConfig::read(&config(folder, "transformer", "denoiser", &classes)?)?;
    // The pipeline does not shift latents, whatever the autoencoder says.
    let kl = kl(folder)?.without_shift();
    expect_equal(
        folder,
        ("the transformer's latents have channels:", dit.base.c_in),
        ("the autoencoder's:", kl.n_latent),
    )?;
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::discrete(folder, DiscreteRule::AsWritten)?;
    let has_own = foreign_scheduler.is_none();
    let samplers = unscaled(samplers, has_own);

    let mut loading = Loading::open(folder, &["transformer", "vae"])?;
    let tables = ClassTables::new(&mut loading.at("transformer"), &dit);
    let denoiser = Dit::new(&mut loading.at("transformer"), dit.clone());
    let decoder = loading.kl_decoder(&kl);

    let side = dit.base.sample_size * kl.factor();
    let sizes = Sizes {
        grid: side,
        default: (side, side),
        max_side: side,
    };
    let n_classes = u32::try_from(dit.n_classes).unwrap_or(u32::MAX);
    loading.finish(Parts {
        info: ModelInfo {
            tasks: vec![Task::ClassToImage],
            ..model_info("dit", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE)
        },
        latents: LatentsLayout {
            steps: TensorLayout::Doubled,
            ..LatentsLayout::picture(dit.base.c_in, kl.factor(), dit.base.patch)
        },
        max_sequence_length: None,
        conditioner: Box::new(ClassConditioner {
            labels,
            n_classes,
            tables,
        }),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Classic,
        decoder: Box::new(decoder),
        encoder: None,
        tasks: Tasks::default(),
        samplers,
        foreign_scheduler,
    })
}

/// A sampler as the pipeline uses it: it begins with noise as it is drawn, and a step goes on from the latents as the denoiser saw them,
/// scaled. Nothing changes for samplers that scale neither.
#[derive(Debug)]
struct Unscaled(Box<dyn Sampler>);

impl Sampler for Unscaled {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn schedule(&self, ask: &Ask<'_>) -> std::result::Result<Schedule, SamplerError> {
        let mut schedule = self.0.schedule(ask)?;
        schedule.init_noise_scale = 1.0;
        for (update, scale) in schedule.updates.iter_mut().zip(&schedule.input_scales) {
            for of_latents in update.rows.iter_mut().filter_map(|row| row.first_mut()) {
                *of_latents *= scale;
            }
        }
        Ok(schedule)
    }
}

/// The pipeline never scales latents as samplers like Euler's need it. So of the samplers that a request may choose, those are left out;
/// the checkpoint's own, the first if `has_own`, computes what it computes there.
fn unscaled(samplers: Vec<Box<dyn Sampler>>, has_own: bool) -> Vec<Box<dyn Sampler>> {
    let ask = Ask {
        n_steps: DEFAULT_N_STEPS as usize,
        sigmas: None,
        n_tokens: 1,
        strength: None,
    };
    let needs_scale = |sampler: &dyn Sampler| match sampler.schedule(&ask) {
        Ok(schedule) => {
            schedule.init_noise_scale != 1.0 || schedule.input_scales.iter().any(|scale| *scale != 1.0)
        }
        Err(_) => false,
    };
    let kept = samplers.into_iter().enumerate();
    let kept = kept.filter(|(idx, sampler)| has_own && *idx == 0 || !needs_scale(&**sampler));
    kept.map(|(_, sampler)| Box::new(Unscaled(sampler)) as Box<dyn Sampler>)
        .collect()
}

/// Names of classes, as `model_index.json` has them.
#[derive(Debug)]
struct Labels {
    /// By class; a later class with the same label counts.
    by_class: Vec<(String, u32)>,
}

impl Labels {
    fn read(options: &Config) -> std::result::Result<Self, ModelError> {
        let key = "id2label";
        let wrong = || options.wrong(key, "an object from class numbers to labels, separated by commas");
        let mut by_class = Vec::new();
        match options.value(key) {
            None | Some(Value::Null) => {}
            Some(Value::Object(map)) => {
                for (class, labels) in map {
                    let class: u32 = class.parse().map_err(|_| wrong())?;
                    let labels = labels.as_str().ok_or_else(wrong)?.split(',');
                    by_class.extend(labels.map(|label| (label.trim().to_owned(), class)));
                }
            }
            Some(_) => return Err(wrong().into()),
        }
        by_class.sort_by_key(|(_, class)| *class);
        Ok(Self { by_class })
    }

    /// The class with this label, as it is written or but for its case.
    fn find(&self, label: &str) -> Option<u32> {
        let exact = self.by_class.iter().rev().find(|(known, _)| known == label);
        let folded = label.to_lowercase();
        let mut all = self.by_class.iter().rev();
        let found = exact.or_else(|| all.find(|(known, _)| known.to_lowercase() == folded));
        found.map(|(_, class)| *class)
    }

    /// Labels like `label`, best first: those that have it in them or are in it, then those with the fewest differing letters.
    fn near(&self, label: &str) -> Vec<&str> {
        let folded = label.to_lowercase();
        let score = |known: &str| {
            let known = known.to_lowercase();
            let is_part = known.contains(&folded) || folded.contains(&known);
            (!is_part, edit_distance(&folded, &known))
        };
        let mut labels: Vec<(_, &str)> = self
            .by_class
            .iter()
            .filter(|(known, _)| !known.is_empty())
            .map(|(known, _)| (score(known), known.as_str()))
            .collect();
        labels.sort();
        labels.dedup();
        labels
            .iter()
            .take(N_SHOWN_LABELS)
            .map(|(_, known)| *known)
            .collect()
    }
}

/// Letters to insert, to take away or to replace that make `a` of `b`; of long texts the beginning counts.
fn edit_distance(a: &str, b: &str) -> usize {
    const MOST: usize = 64;
    let b: Vec<char> = b.chars().take(MOST).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (row_idx, in_a) in a.chars().take(MOST).enumerate() {
        let mut diagonal = row[0];
        row[0] = row_idx + 1;
        for (idx, in_b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(in_a != *in_b);
            diagonal = row[idx + 1];
            row[idx + 1] = replaced.min(row[idx] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Classes in the place of texts.
#[derive(Debug)]
struct ClassConditioner {
    labels: Labels,
    n_classes: u32,
    tables: ClassTables,
}

impl ClassConditioner {
    fn class(&self, prompt: &str, what: &str) -> std::result::Result<u32, String> {
        let prompt = prompt.trim();
        if prompt.is_empty() {
            return Ok(NO_CLASS.min(self.n_classes));
        }
        if what != "prompt" {
            return Err(format!(
                "this model is told classes and takes no {what}; leave it out"
            ));
        }
        let last = self.n_classes - 1;
        let known = match prompt.parse::<u32>() {
            Ok(class) if class <= last => return Ok(class),
            Ok(class) => {
                return Err(format!(
                    "the prompt is class {class}, this model knows 0 to {last}"
                ));
            }
            Err(_) => self.labels.find(prompt),
        };
        let shown: String = prompt.chars().take(100).collect();
        match known {
            Some(class) if class <= last => Ok(class),
            Some(class) => Err(format!(
                "the prompt {shown:?} is class {class}, this model knows 0 to {last}"
            )),
            None if self.labels.by_class.is_empty() => Err(format!(
                "the prompt is {shown:?}; this model is told classes by number, 0 to {last}, as its files name none"
            )),
            None => Err(format!(
                "the prompt {shown:?} is no class of this model; near are {}; numbers are 0 to {last}",
                self.labels.near(prompt).join(", ")
            )),
        }
    }
}

impl Conditioner for ClassConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        _: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        Ok(Tokenized {
            fitted: vec![vec![self.class(text, what)?]],
            ..Tokenized::default()
        })
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, _: &EncodeArgs<'_>) -> Result<Conditioning> {
        let class = text.fitted[0][0];
        Ok(Conditioning::of_tokens(self.tables.forward(ctx, class)?))
    }

    fn max_clip_skip(&self) -> usize {
        0
    }

    fn trace(&self, _: &Ctx<'_>, _: &Conditioning, _: Option<&Conditioning>) -> Result<Vec<NamedTensor>> {
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels() -> Labels {
        Labels {
            by_class: [
                ("tench", 0),
                ("Tinca tinca", 0),
                ("great white shark", 2),
                ("white shark", 2),
                ("crane", 134),
                ("crane", 517),
            ]
            .map(|(label, class)| (label.to_owned(), class))
            .to_vec(),
        }
    }

    #[test]
    fn labels_are_found_by_name_and_the_later_class_counts() {
        let labels = labels();
        assert_eq!(labels.find("white shark"), Some(2));
        assert_eq!(labels.find("tinca TINCA"), Some(0));
        assert_eq!(labels.find("crane"), Some(517));
        assert_eq!(labels.find("shark"), None);
    }

    #[test]
    fn near_labels_share_words_or_letters() {
        let labels = labels();
        assert_eq!(labels.near("shark")[..2], ["white shark", "great white shark"]);
        assert_eq!(labels.near("tensh")[0], "tench");
        assert_eq!(edit_distance("kitten", "sitting"), 3); // The textbook's example.
        assert_eq!(edit_distance("", "abc"), 3);
    }
}
