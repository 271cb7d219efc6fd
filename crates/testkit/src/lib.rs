//! Conformance suites, scripted workers and fixtures for tests

pub mod fake_executor;
