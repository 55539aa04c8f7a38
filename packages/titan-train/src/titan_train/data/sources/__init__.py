"""Text in: the files of a source, their documents, and the tokens of each document.

- `files`: read one file, plain, gzip or zstandard; detect truncation; hash the content.
- `documents`: list the files of a source and split them into documents.
- `malformed`: what to do with a malformed document: raise, skip or quarantine.
- `document`: a file, a document, and which documents are held out for validation.
- `encoding`: tokenize documents on all cores, in order.
- `texts`: the documents as text, to train and judge a tokenizer.
"""
