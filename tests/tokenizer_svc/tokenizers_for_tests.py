"""Small tokenizers with the shapes of real ones."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "▁"


def sentencepiece_pieces() -> tuple[list[str], list[float]]:
    """Pieces and scores as a Llama-2-style vocabulary has them: three control tokens, 256
    byte tokens, then words with what they are merged from."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [0.0] * len(pieces)
    words = [f"{SPACE}hello", f"{SPACE}world", f"{SPACE}the", "日本", "é"]
    merged = [word[:end] for word in words for end in range(2, len(word) + 1)]
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz.,!", "日", "本", "é"]
    for rank, piece in enumerate(dict.fromkeys([*merged, *letters])):
        pieces.append(piece)
        scores.append(-float(rank))
    return pieces, scores


def sentencepiece_tokenizer() -> Tokenizer:
    """Built as Llama-2's tokenizer.json is."""
    pieces, _ = sentencepiece_pieces()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (piece[:-1], piece[-1])
        for piece in pieces[259:]
        if len(piece) > 1 and piece[:-1] in vocab and piece[-1] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """A decoder that is no joining of bytes: it puts spaces between words."""
    words = ["[UNK]", "[SEP]", "play", "##ing", "##ed", "a", "game", "日", "##本"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer
