#!/usr/bin/env bash
# Rebuilds both checkpoints from nothing with the settings of the shipped ones. About an hour and a half on
# two AVX2 cores. Run in this folder, in a venv with requirements.txt:
#     BUILD=build OUT=out bash run_all.sh
# BUILD receives data and training state, OUT the finished folders; THREADS sets the threads (2).
set -euo pipefail
export BUILD="${BUILD:-build}" OUT="${OUT:-out}"
./fetch.sh
python data.py
python vae.py --steps 1930 --batch 12 --cool 900
python latents.py
python train_dit.py --core --steps 2270 --batch 32 --heads 4 --lr 2e-3 --cool 1400
python export.py dit
python samples.py emoji-dit
python train_unet.py --core --steps 4250 --batch 32 --cool 330
python export.py unet
python samples.py emoji-unet
for name in emoji-dit emoji-unet; do
  python ../reference/make_demo_case.py "$OUT/$name" --out "$OUT/cases/$name"
done
