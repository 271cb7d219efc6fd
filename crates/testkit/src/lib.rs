//! Conformance suites, scripted workers and fixtures for tests.
//!
//! Development only: nothing ships with it. An embedder's own executor runs [`suites::executor`] through
//! [`executor_conformance!`] with workers that serve [`script::scripted_registry`].
#![forbid(unsafe_code)]

pub mod suites;

pub mod fake_executor;
pub mod process;
pub mod rounding;
pub mod script;
pub mod standin;
pub mod watchdog;
