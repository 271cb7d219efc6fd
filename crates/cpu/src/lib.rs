//! The op set on CPU threads and SIMD
