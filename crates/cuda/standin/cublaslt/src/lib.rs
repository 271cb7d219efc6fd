//! Stand-in `libcublasLt.so`: strided-batched products with bias for f32, f16 and bf16, in stream order through the stand-in's driver.
//!
//! R1. What the real library refuses is refused: shapes, leading dimensions, types, a bias without its pointer.
//! R2. An algorithm fits only what it was asked for, and operands must be as aligned as was promised (256 bytes unless told otherwise):
//!     a product that breaks this stops the program, where a device would read wrong or fault.
//! R3. Sums are f32 and in one order for each element, whatever the batch.
#![allow(non_snake_case)]

mod api;
mod product;
