"""Grammars: from a text that says what an answer must look like to masks of next tokens.

    spec.py → compiler.py (worker.py) → bytes → load → Matcher → masks.py

Backends (backend.py, choice.py) differ in what they can express: schema_check.py and tag_check.py
refuse what one of them would not enforce, and regex_syntax.py gives both one dialect. No jax here;
xgrammar and torch only in the file named after it, when it is used.
"""
