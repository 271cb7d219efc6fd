//! Integration tests: one binary, a module per subject.

mod cancel;
mod cli;
mod cuda;
mod fault_cases;
mod layering;
mod process_death;
mod reference;
mod support;
mod tasks;
