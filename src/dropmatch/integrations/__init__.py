"""dropmatch inside other people's programs. Each module needs that program installed, and is imported only by name."""
