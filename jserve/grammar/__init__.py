"""Grammars: from a text that says what an answer must look like to masks of next tokens.

    spec.py → compiler.py (worker.py) → bytes → load → Matcher → masks.py

Backends (backend.py, choice.py) differ in what they can express: schema_check.py, tag_check.py and
ebnf_check.py refuse what one of them would not enforce, and what has no end; regex_syntax.py gives
both one dialect. What a library says is wrong is put into plain words by library_words.py, and gets
its place from contradictions.py. No jax here; xgrammar and torch only in the file named after it,
when it is used.
"""
