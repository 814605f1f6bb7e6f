//go:build tools

// Package h2spec pins the version of h2spec; `tools/h2spec.py` builds it.
package h2spec

import _ "github.com/summerwind/h2spec/cmd/h2spec"
