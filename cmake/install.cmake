# exported targets, see docs/architecture.md
