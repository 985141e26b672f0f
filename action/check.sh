#!/usr/bin/env bash
# Checks $TARGET on $GPU with $OPTIONS: annotations on stdout, alerts and a comment in a folder, the comment in the
# run's summary too. What it found is an output of the step; it fails only where a check could not run.
set -euo pipefail
folder=$(mktemp -d "${RUNNER_TEMP:-/tmp}/tilefit.XXXXXX")
findings=0 number=0
set -f # targets and options are split at blanks, and nothing else
for target in $TARGET; do
    number=$((number + 1))
    report="$folder/$number.json"
    # 1 is findings; 2 is a check that could not run.
    # shellcheck disable=SC2086
    tilefit check "$target" --gpu "$GPU" --min-gain "$MIN_GAIN" $OPTIONS \
        --output-format json --output-file "$report" || test $? -eq 1
    tilefit report "$report" --output-format github
    tilefit report "$report" --output-format sarif --output-file "$folder/$number.sarif"
    tilefit report "$report" --output-format markdown >> "$folder/comment.md"
    lines=$(tilefit report "$report" --output-format concise | wc -l)
    findings=$((findings + lines))
done
cat "$folder/comment.md" >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
printf 'findings=%d\nfolder=%s\n' "$findings" "$folder" >> "${GITHUB_OUTPUT:-/dev/stderr}"
