//! Collects the weights that layers ask for.

use denoised_tensor::{Precision, WeightKind, WeightSpec};
use std::collections::BTreeSet;

/// Position of a weight in the list of specs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightIdx(usize);

impl WeightIdx {
    pub(crate) fn get(self) -> usize {
        self.0
    }
}

/// The list of weights under construction, beside the names that a checkpoint holds.
#[derive(Debug)]
pub struct Declare {
    stored: BTreeSet<String>,
    specs: Vec<WeightSpec>,
}

impl Declare {
    /// Begins with the names of all tensors of the checkpoint.
    pub fn new(stored: impl IntoIterator<Item = String>) -> Self {
        Self {
            stored: stored.into_iter().collect(),
            specs: Vec::new(),
        }
    }

    /// The place whose names begin with `prefix` as it stands, e.g. `transformer/`.
    pub fn at(&mut self, prefix: &str) -> Scope<'_> {
        Scope {
            prefix: prefix.to_owned(),
            declare: self,
        }
    }

    /// All specs in order of declaration.
    pub fn finish(self) -> Vec<WeightSpec> {
        self.specs
    }
}

/// A place in the checkpoint's tree of names.
#[derive(Debug)]
pub struct Scope<'a> {
    prefix: String,
    declare: &'a mut Declare,
}

impl Scope<'_> {
    /// The place `name` below this one.
    pub fn at(&mut self, name: impl std::fmt::Display) -> Scope<'_> {
        Scope {
            prefix: format!("{}{name}.", self.prefix),
            declare: self.declare,
        }
    }

    /// The full name of `name` below this place.
    pub fn full_name(&self, name: impl std::fmt::Display) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether the checkpoint holds the tensor `name`.
    pub fn is_stored(&self, name: &str) -> bool {
        self.declare.stored.contains(&self.full_name(name))
    }

    /// Declares the concatenation (along dimension 0) of the tensors `names`, of shape `shape` in all.
    pub fn weight(&mut self, names: &[String], kind: WeightKind, shape: &[usize]) -> WeightIdx {
        let sources = names.iter().map(|name| self.full_name(name)).collect();
        self.declare.specs.push(WeightSpec {
            sources,
            kind,
            shape: shape.to_vec(),
            precision: Precision::Device,
        });
        WeightIdx(self.declare.specs.len() - 1)
    }

    /// Declares `weight` or `bias` below each of the places `names` as one.
    pub(crate) fn fused(
        &mut self,
        names: &[&str],
        leaf: &str,
        kind: WeightKind,
        shape: &[usize],
    ) -> WeightIdx {
        let names: Vec<String> = names
            .iter()
            .map(|name| {
                if name.is_empty() {
                    leaf.to_owned()
                } else {
                    format!("{name}.{leaf}")
                }
            })
            .collect();
        self.weight(&names, kind, shape)
    }

    /// A bias, norm or modulation vector.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> WeightIdx {
        self.weight(&[name.to_owned()], WeightKind::Vector, &[len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Linear;

    #[test]
    fn names_are_joined_and_fused() {
        let stored = ["a/attn.to_q.weight", "a/attn.extra"];
        let mut declare = Declare::new(stored.map(str::to_owned));
        let mut root = declare.at("a/");
        let mut scope = root.at("attn");
        assert!(scope.is_stored("extra") && !scope.is_stored("to_v.weight"));
        Linear::fused(&mut scope, &["to_q", "to_k"], 3, 10, true);
        Linear::without_bias(&mut root.at("out.0"), 5, 7);
        let specs = declare.finish();
        assert_eq!(specs.len(), 3);
        assert_eq!(specs[0].sources, ["a/attn.to_q.weight", "a/attn.to_k.weight"]);
        assert_eq!(specs[0].shape, [10, 3]);
        assert_eq!(specs[1].sources, ["a/attn.to_q.bias", "a/attn.to_k.bias"]);
        assert_eq!(specs[2].sources, ["a/out.0.weight"]);
    }
}
