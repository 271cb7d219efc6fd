//! The same tests for every implementation of a contract.

pub mod executor;
