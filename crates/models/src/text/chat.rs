//! The fixed texts that diffusers' pipelines put around a prompt for Qwen's language models.
//!
//! Where diffusers takes them from the tokenizer's chat template, that template is compared with the one that is known: it is not carried
//! out here.

use super::{files::Files, qwen_tokenizer::QwenTokenizer};
use crate::ModelError;
use denoised_checkpoint::Folder;
use serde_json::Value;

/// What stands before and behind a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chat {
    before: &'static str,
    behind: &'static str,
    /// How many of the first tokens are left out of what the encoder gives: those of `before`.
    pub(crate) n_dropped: usize,
}

/// Stands for the tokens of a picture.
pub(crate) const IMAGE_PAD: &str = "<|image_pad|>";
const END: &str = "<|im_end|>\n<|im_start|>assistant\n";

impl Chat {
    /// Qwen3's chat template for one message of the user, thinking allowed: Z-Image.
    pub(crate) const THINKING: Self = Self {
        before: "<|im_start|>user\n",
        behind: END,
        n_dropped: 0,
    };
    /// The same with an empty thought: FLUX.2 klein.
    pub(crate) const NOT_THINKING: Self = Self {
        behind: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ..Self::THINKING
    };
    /// Qwen-Image's.
    pub(crate) const QWEN_IMAGE: Self = Self {
        before: "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, \
                 spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n",
        behind: END,
        n_dropped: 34,
    };
    /// Qwen-Image-Edit's; the pictures stand before the prompt, see [`Chat::with_pictures`].
    pub(crate) const QWEN_IMAGE_EDIT: Self = Self {
        before: "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, \
                 background), then explain how the user's text instruction should alter or modify the image. Generate a \
                 new image that meets the user's requirements while maintaining consistency with the original input where \
                 appropriate.<|im_end|>\n<|im_start|>user\n",
        behind: END,
        n_dropped: 64,
    };

    /// The prompt as the encoder is to read it.
    pub(crate) fn apply(&self, prompt: &str) -> String {
        [self.before, prompt, self.behind].concat()
    }

    /// As [`Chat::apply`] with pictures before the prompt, each of as many tokens as `n_tokens` says; `are_numbered` is how
    /// Qwen-Image-Edit-Plus has it.
    pub(crate) fn with_pictures(&self, prompt: &str, n_tokens: &[usize], are_numbered: bool) -> String {
        let mut text = self.before.to_owned();
        for (n_tokens, number) in n_tokens.iter().zip(1..) {
            if are_numbered {
                text.push_str(&format!("Picture {number}: "));
            }
            text.push_str("<|vision_start|>");
            text.push_str(&IMAGE_PAD.repeat(*n_tokens));
            text.push_str("<|vision_end|>");
        }
        text.push_str(prompt);
        text.push_str(self.behind);
        text
    }

    /// Refuses a text in which not just the `n_tokens` of its pictures have the id `pad`: the prompt itself holds that token.
    ///
    /// # Errors
    /// In words.
    pub(crate) fn check_pictures(ids: &[u32], pad: u32, n_tokens: usize) -> Result<(), String> {
        let n_places = ids.iter().filter(|id| **id == pad).count();
        if n_places == n_tokens {
            return Ok(());
        }
        Err(format!(
            "the prompt holds {IMAGE_PAD}, which stands for pictures and cannot be written"
        ))
    }

    /// Refuses a tokenizer that lacks the tokens of the templates.
    ///
    /// # Errors
    /// It has no such token.
    pub(crate) fn check_tokens(
        tokenizer: &QwenTokenizer,
        folder: &Folder,
        component: &str,
    ) -> Result<(), ModelError> {
        for token in ["<|im_start|>", "<|im_end|>"] {
            if tokenizer.id(token).is_none() {
                let problem = format!("there is no token {token}, with which every prompt begins and ends");
                return Err(Files { folder, component }.error("", problem));
            }
        }
        Ok(())
    }

    /// Refuses a chat template that is not Qwen3's: `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json`.
    ///
    /// # Errors
    /// There is none, or it is another.
    pub(crate) fn check_qwen3(folder: &Folder, component: &str) -> Result<(), ModelError> {
        let files = Files { folder, component };
        let file = "chat_template.jinja";
        let (file, template) = if files.has(file) {
            (file, files.text(file)?)
        } else {
            let file = "tokenizer_config.json";
            let template = match files.json(file)?["chat_template"].take() {
                Value::String(template) => template,
                // A list of templates with names.
                Value::Array(list) => {
                    let default = list.iter().find(|one| one["name"] == "default");
                    let template = default.and_then(|one| one["template"].as_str());
                    template.unwrap_or_default().to_owned()
                }
                _ => String::new(),
            };
            (file, template)
        };
        check_template(&template).map_err(|problem| files.error(file, problem))
    }
}

/// What Qwen3's template must hold for [`Chat::THINKING`] and [`Chat::NOT_THINKING`] to be what it makes, without white space.
const PARTS: [&str; 2] = [r"'<|im_start|>'+message.role+'\n'+", r"+'<|im_end|>'+'\n'"];
/// How it ends.
const LAST: &str = r"{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\n'}}{%-ifenable_thinkingisdefinedandenable_thinkingisfalse%}{{-'<think>\n\n</think>\n\n'}}{%-endif%}{%-endif%}";
/// What begins the instructions that Qwen2.5's template adds.
const SYSTEM: &str = "You are";

fn check_template(template: &str) -> Result<(), String> {
    if template.is_empty() {
        return Err("there is no chat template".to_owned());
    }
    let compact: String = template.split_whitespace().collect();
    let is_known = compact.ends_with(LAST)
        && PARTS.iter().all(|part| compact.contains(part))
        && !template.contains(SYSTEM);
    if is_known {
        return Ok(());
    }
    let ends: String = template
        .chars()
        .skip(template.chars().count().saturating_sub(120))
        .collect();
    Err(format!(
        "the chat template is not Qwen3's, which is the only one supported; it ends {ends:?}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tables::table;

    #[test]
    fn templates_are_those_of_diffusers() {
        // `tests/tables/make_chat.py`.
        let table = table("chat.json");
        let rows = table["rows"].as_array().expect("a list");
        assert!(rows.len() >= 12);
        for row in rows {
            let [name, prompt, theirs] =
                ["name", "prompt", "text"].map(|key| row[key].as_str().expect("a text"));
            let n_tokens: Vec<usize> = crate::text::tables::numbers(&row["n_tokens"])
                .into_iter()
                .map(|n| n as usize)
                .collect();
            let (chat, are_numbered) = match name {
                "Flux2KleinPipeline" => (Chat::NOT_THINKING, false),
                "ZImagePipeline" => (Chat::THINKING, false),
                "QwenImagePipeline" => (Chat::QWEN_IMAGE, false),
                "QwenImageEditPipeline" => (Chat::QWEN_IMAGE_EDIT, false),
                "QwenImageEditPlusPipeline" => (Chat::QWEN_IMAGE_EDIT, true),
                other => panic!("{other}"),
            };
            assert_eq!(
                chat.with_pictures(prompt, &n_tokens, are_numbered),
                theirs,
                "{name}"
            );
            if n_tokens.is_empty() {
                assert_eq!(chat.apply(prompt), theirs, "{name}");
            }
            assert_eq!(chat.n_dropped as u64, row["n_dropped"], "{name}");
        }
    }

    #[test]
    fn a_prompt_cannot_hold_tokens_of_pictures() {
        assert_eq!(Chat::check_pictures(&[3, 9, 9, 4], 9, 2), Ok(()));
        let problem = Chat::check_pictures(&[3, 9, 9, 9], 9, 2).expect_err("one too many");
        assert!(problem.contains(IMAGE_PAD));
    }

    #[test]
    fn only_qwen3s_template_is_taken() {
        let table = table("chat.json");
        let known = table["template"].as_str().expect("a text");
        check_template(known).expect("it is Qwen3's");
        for (from, to) in [
            ("is false", "is true"),
            ("message.role + '\\n'", "message.role + ' '"),
            ("'<think>", "'<thought>"),
            ("{%- for", "{{- 'You are a helpful assistant.' }}{%- for"),
        ] {
            assert!(known.contains(from));
            let problem = check_template(&known.replacen(from, to, 1)).expect_err("it is another");
            assert!(problem.contains("not Qwen3's"));
        }
        assert!(check_template("").is_err());
    }
}
