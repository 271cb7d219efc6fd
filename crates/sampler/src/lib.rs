//! Noise schedules, solvers and torch's CPU noise as host arithmetic
