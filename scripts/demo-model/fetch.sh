#!/usr/bin/env bash
# Fetches the two source packages with their ordinary clients into $BUILD/dl.
#   Debian  fonts-noto-color-emoji  (glyph bitmaps; SIL OFL 1.1, tooling Apache-2.0)
#   npm     emojibase-data          (English Unicode CLDR names and keywords; MIT, Unicode licence)
set -euo pipefail
BUILD="${BUILD:-build}"
mkdir -p "$BUILD/dl"
cd "$BUILD/dl"
if [ ! -f package/en/data.json ]; then
  npm pack --silent emojibase-data@17.0.0 >/dev/null
  tar xzf emojibase-data-17.0.0.tgz package/en/data.json package/meta/groups.json package/LICENSE
fi
if [ ! -d font ]; then
  apt-get download fonts-noto-color-emoji
  dpkg-deb -x fonts-noto-color-emoji_*.deb font
fi
ls -l package/en/data.json font/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf
