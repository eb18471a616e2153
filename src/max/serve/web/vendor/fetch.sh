#!/usr/bin/env bash
# Gets the libraries of the chat page from their packages; --update writes their checksums anew.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# PACKAGE@VERSION FOLDER FILE...: a file is named from the root of the package
get() {
	local package=$1 folder=$2
	shift 2
	local archive
	archive=$(npm pack --silent --pack-destination "$work" "$package")
	rm -rf "$work/package" && tar -xzf "$work/$archive" -C "$work"
	rm -rf "$folder" && mkdir -p "$folder"
	local file
	for file in LICENSE "$@"; do
		cp "$work"/package/$file "$folder/"
	done
}

get markdown-it@15.0.3 markdown-it dist/browser/markdown-it.esm.min.mjs
get dompurify@3.5.0 dompurify dist/purify.min.js
get katex@0.19.1 katex dist/katex.min.js dist/katex.min.css
mkdir katex/fonts && cp "$work"/package/dist/fonts/*.woff2 katex/fonts/
get @highlightjs/cdn-assets@11.12.0 highlight.js es/highlight.min.js

sums() { find . -mindepth 2 -type f | sort | xargs sha256sum; }
if [ "${1:-}" = --update ]; then sums > SHA256SUMS; fi
sums | diff - SHA256SUMS && echo "The files are those of SHA256SUMS."
