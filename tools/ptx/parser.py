"""PTX text -> Program: one kernel, its registers numbered, its labels resolved.

What Triton writes: one entry, no functions, no calls; inline assembly with scopes of its own. Anything else is an error
that names the line."""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .instruction import (
    WIDTHS,
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Predicate,
    PtxError,
    Register,
    Special,
    Symbol,
    Vector,
)

_TOKEN = re.compile(r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/) |
    (?P<string>"[^"]*") |
    (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|\d+U?) |
    (?P<word>[.%]?[A-Za-z_$][\w$]*(?:(?:\.|::)[\w$]+)*) |
    (?P<sign>[{}\[\](),;:|@!+\-<>=])
    """, re.VERBOSE | re.DOTALL)

_BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
         "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}


@dataclass(frozen=True)
class Param:
    """A parameter of the kernel. size: bytes; an array of bytes is a tensor map."""

    name: str
    size: int
    is_array: bool


@dataclass
class Program:
    """registers: width -> how many. shared: variable -> its address; shared_bytes: of those whose size is known. local:
    the same of memory that every thread has for itself. data: tables in global memory that come with the program."""

    name: str = ""
    arch: str = ""
    num_threads: int = 0
    params: list[Param] = field(default_factory=list)
    registers: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WIDTHS, 0))
    instructions: list[Instruction] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    data: dict[str, bytes] = field(default_factory=dict)


@dataclass
class _Scope:
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Prefix -> width, index of its first, how many."""
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Raises PtxError, with the line."""
    return _Parser(text).program()


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(_scan(text))
        self._at = 0
        self._program = Program()
        self._scopes: list[_Scope] = []
        self._branches: list[tuple[int, list[_Scope]]] = []
        self._label = ""
        self._tables: dict[str, list[str]] = {}
        """Label -> the labels that brx.idx chooses from."""

    # tokens

    def _next(self) -> str:
        token = self._tokens[self._at][0] if self._at < len(self._tokens) else ""
        self._at += 1
        return token

    def _peek(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return self._tokens[place][0] if place < len(self._tokens) else ""

    def _accept(self, token: str) -> bool:
        if self._peek() == token:
            self._at += 1
            return True
        return False

    def _expect(self, token: str) -> None:
        if (found := self._next()) != token:
            raise self._error(f"expected {token!r}, got {found!r}")

    def _error(self, text: str) -> PtxError:
        return PtxError(f"line {self._tokens[min(self._at, len(self._tokens)) - 1][1]}: {text}")

    def _until(self, *ends: str) -> list[str]:
        found = []
        while (token := self._next()) not in ends:
            if not token:
                raise self._error(f"the text ends before {ends[0]!r}")
            found.append(token)
        return found

    # the module

    def program(self) -> Program:
        while token := self._next():
            if token == ".version" or token == ".address_size":
                self._next()
            elif token == ".target":
                self._program.arch = self._next()
                while self._accept(","):
                    self._next()
            elif token == ".entry":
                self._entry()
            elif token in (".shared", ".extern", ".global", ".const"):
                self._variable(token)
            elif token not in (".visible", ".weak"):
                raise self._error(f"{token!r} is not supported at the top of a module")
        if not self._program.instructions:
            raise PtxError("there is no .entry")
        return self._program

    def _variable(self, space: str) -> None:
        words = self._until(";")
        if ".shared" in (space, *words):
            name, size, alignment, _ = self._declared(words)
            begin = -(-self._program.shared_bytes // alignment) * alignment
            self._program.shared[name] = begin
            self._program.shared_bytes = begin + size
        else:
            name, size, _, width = self._declared(words)
            values = [word for word in words[words.index("=") :] if word[0].isdigit()] if "=" in words else []
            data = b"".join(int(_number(word)).to_bytes(width, "little") for word in values)
            self._program.data[name] = data + bytes(size - len(data))

    def _local(self) -> None:
        name, size, alignment, _ = self._declared(self._until(";"))
        self._program.local[name] = begin = -(-self._program.local_bytes // alignment) * alignment
        self._program.local_bytes = begin + size

    def _declared(self, words: list[str]) -> tuple[str, int, int, int]:
        """Of ".align 16 .b8 name[100]": name, bytes, alignment, bytes of an element. name[] has none: it is dynamic
        shared memory, which begins where the rest ends."""
        alignment = int(words[words.index(".align") + 1]) if ".align" in words else 16
        width = next(_BITS[word[1:]] for word in words if word[1:] in _BITS) // 8
        end = words.index("=") if "=" in words else len(words)
        opening = words.index("[") if "[" in words[:end] else end
        sizes = [int(word) for word in words[opening:end] if word.isdecimal()]
        count = 0 if opening < end and not sizes else sizes[0] if sizes else 1
        return words[opening - 1], width * count, alignment, width

    def _entry(self) -> None:
        if self._program.instructions:
            raise self._error("more than one .entry")
        self._program.name = self._next()
        if self._accept("("):
            while not self._accept(")"):
                self._param(self._until(",", ")"))
                if self._tokens[self._at - 1][0] == ")":
                    break
        while not self._accept("{"):
            if self._next() in (".reqntid", ".maxntid"):
                self._program.num_threads = int(self._next())
                while self._accept(","):
                    self._program.num_threads *= int(self._next())
            else:
                self._until_directive()
        self._body()

    def _until_directive(self) -> None:
        while not self._peek().startswith(".") and self._peek() not in ("{", ""):
            self._next()

    def _param(self, words: list[str]) -> None:
        if not words:
            return
        kind = next(_BITS[word[1:]] for word in words if word[1:] in _BITS) // 8
        if words[-1] == "]":
            self._program.params.append(Param(words[-4], kind * int(words[-2]), True))
        else:
            self._program.params.append(Param(words[-1], kind, False))

    # a kernel's body

    def _body(self) -> None:
        self._scopes = [_Scope()]
        while self._scopes:
            token = self._next()
            if token == "{":
                self._scopes.append(_Scope())
            elif token == "}":
                self._scopes.pop()
            elif token == ".reg":
                self._registers()
            elif token == ".shared":
                self._variable(token)
            elif token == ".local":
                self._local()
            elif token == ".pragma":
                self._until(";")
            elif token == ".branchtargets":
                self._tables[self._label] = [word for word in self._until(";") if word != ","]
            elif token == ";":
                continue
            elif self._peek() == ":":
                self._next()
                self._label = token
                self._scopes[-1].labels[token] = len(self._program.instructions)
            elif token:
                self._instruction(token)
            else:
                raise self._error("the kernel does not end")
        self._resolve()

    def _registers(self) -> None:
        kind = self._next().lstrip(".")
        if kind not in _BITS:
            raise self._error(f"registers of type .{kind} are not supported")
        width, scope = _BITS[kind], self._scopes[-1]
        while True:
            name = self._next()
            first, count = self._program.registers[width], 1
            if self._accept("<"):
                count = int(self._next())
                self._expect(">")
                scope.ranges[name] = width, first, count
            else:
                scope.registers[name] = Register(name, width, first)
            self._program.registers[width] += count
            if self._accept(";"):
                return
            self._expect(",")

    def _instruction(self, token: str) -> None:
        line = self._tokens[self._at - 1][1]
        predicate = None
        if token == "@":
            negated = self._accept("!")
            register = self._named(self._next())
            if not isinstance(register, Register) or register.width != 1:
                raise self._error("what follows @ is no predicate")
            predicate, token = Predicate(register, negated), self._next()
        operands: list[Operand | None] = []
        while not self._accept(";"):
            operands.append(self._operand())
            if self._peek() != ";":
                self._expect(",")
        if token == "brx.idx":
            self._chain(operands, predicate, line)
            return
        if token.partition(".")[0] == "bra":
            self._branches.append((len(self._program.instructions), list(self._scopes)))
        self._program.instructions.append(Instruction(token, tuple(operands), predicate, line))

    def _chain(self, operands: list[Operand | None], predicate: Predicate | None, line: int) -> None:
        """brx.idx register, table: a comparison and a branch for each label of the table."""
        index, table = operands
        if predicate is not None or not isinstance(table, Symbol) or table.name not in self._tables:
            raise self._error("brx.idx without a table before it, or with a predicate, is not supported")
        chosen = Register(f"%chosen{line}", 1, self._program.registers[1])
        self._program.registers[1] += 1
        for number, label in enumerate(self._tables[table.name]):
            self._program.instructions.append(
                Instruction("setp.eq.s32", (chosen, index, Immediate(number)), None, line))
            self._branches.append((len(self._program.instructions), list(self._scopes)))
            self._program.instructions.append(
                Instruction("bra", (Symbol(label),), Predicate(chosen, False), line))
        self._program.instructions.append(Instruction("trap", (), None, line))

    def _operand(self) -> Operand | None:
        if self._accept("{"):
            items = []
            while not self._accept("}"):
                items.append(self._operand())
                self._accept(",")
            return Vector(tuple(items))
        if self._accept("["):
            return self._address()
        first = self._value()
        if self._accept("|"):
            return Pair(first, self._value())
        return first

    def _value(self) -> Operand | None:
        token = self._next()
        if token == "-":
            return Immediate(-_number(self._next()))
        if token[:1].isdigit():
            return Immediate(_number(token))
        return None if token == "_" else self._named(token)

    def _address(self) -> Address:
        base = self._value()
        assert base is not None
        offset = 0
        coordinates: tuple[Operand, ...] = ()
        if self._accept("+"):
            sign = -1 if self._accept("-") else 1
            offset = sign * int(_number(self._next()))
        elif self._accept("-"):
            offset = -int(_number(self._next()))
        if self._accept(","):
            found = self._operand()
            if not isinstance(found, Vector):
                raise self._error("expected the coordinates of a tensor map")
            coordinates = tuple(item for item in found.items if item is not None)
        self._expect("]")
        return Address(base, offset, coordinates)

    def _named(self, name: str) -> Operand:
        digits = re.search(r"\d+$", name)
        for scope in reversed(self._scopes):
            if name in scope.registers:
                return scope.registers[name]
            if digits and (known := scope.ranges.get(name[: digits.start()])):
                width, first, count = known
                if int(digits.group()) >= count:
                    raise self._error(f"{name} is not declared: there are {count}")
                found = scope.registers[name] = Register(name, width, first + int(digits.group()))
                return found
        return Special(name) if name.startswith("%") else Symbol(name)

    def _resolve(self) -> None:
        """Labels become numbers of instructions."""
        for place, scopes in self._branches:
            branch = self._program.instructions[place]
            label = branch.operands[0]
            name = label.name if isinstance(label, Symbol) else str(label)
            target = next((scope.labels[name] for scope in reversed(scopes) if name in scope.labels), None)
            if target is None:
                raise PtxError(f"line {branch.line}: there is no label {name}")
            self._program.instructions[place] = replace(branch, operands=(Immediate(target),))


def _scan(text: str) -> Iterator[tuple[str, int]]:
    """(token, line) without spaces and comments."""
    line, end = 1, 0
    for match in _TOKEN.finditer(text):
        if match.start() != end:
            raise PtxError(f"line {line}: cannot read {text[end : end + 20]!r}")
        end = match.end()
        if match.lastgroup == "space":
            line += match.group().count("\n")
        else:
            yield match.group(), line
    if end != len(text):
        raise PtxError(f"line {line}: cannot read {text[end : end + 20]!r}")


def _number(token: str) -> int | float:
    if token[:2].lower() in ("0f", "0d"):
        return int(token[2:], 16)
    if token[:2].lower() == "0x":
        return int(token.rstrip("Uu"), 16)
    return float(token) if "." in token else int(token.rstrip("Uu"))
