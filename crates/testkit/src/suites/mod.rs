//! The same tests for every implementation of a contract.

pub mod backend;
pub mod executor;
