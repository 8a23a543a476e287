"""Mutants of access: identities, roles, quotas, tokens, certificates, and the door of the dashboard."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, replace, skip

MATRIX = "security/test_access_matrix.py::test_every_cell_of_the_table"
LISTS = "security/test_access_matrix.py::test_lists_show_only_what_the_caller_may_read"
RULES = "security/test_rules.py::test_"
HOSTILE = "security/test_hostile.py::test_"
WEB = "dashboard/test_web.py::test_"
TICKETS = "control/test_ticket_access.py::test_"
ROWS = "security/test_permissions.py::test_"
TOKENS = "security/test_tokens.py::test_"
QUESTIONS = "worker/test_questions.py::test_"


def access(name: str, rule: str, planter: Planter, *tests: str) -> Mutant:
    """A row of who may do what."""
    return mutant(f"access-{name}", f"access: {rule}", planter, *tests)


PERMISSIONS = [
    access(
        "pin-needs-read",
        "pin needs write",
        edit(
            "kvstore.security.guard:Guard.admit",
            "permission = PERMISSIONS.get(method)",
            'permission = PERMISSIONS.get("Hold" if method == "Pin" else method)',
        ),
        f"{ROWS}each_method_needs_what_its_operations_need",
    ),
    access(
        "put-needs-read",
        "put needs write",
        edit(
            "kvstore.security.guard:Guard.admit",
            "permission = PERMISSIONS.get(method)",
            'permission = PERMISSIONS.get("Get" if method == "Put" else method)',
        ),
        f"{ROWS}each_method_needs_what_its_operations_need",
    ),
    access(
        "clear-needs-write",
        "clear needs admin",
        edit(
            "kvstore.security.guard:Guard.admit",
            "permission = PERMISSIONS.get(method)",
            'permission = PERMISSIONS.get("Pin" if method == "Clear" else method)',
        ),
        f"{ROWS}each_method_needs_what_its_operations_need",
    ),
    access(
        "drain-needs-one-tenant",
        "drain needs admin in every tenant",
        edit("kvstore.security.guard:Guard.admit", "if permission.scope is Scope.EVERY:", "if False:"),
        f"{ROWS}what_is_about_the_worker_needs_every_tenant",
    ),
    access(
        "unknown-method-allowed",
        "X4: a method that is not in the table is denied",
        edit("kvstore.security.guard:Guard.admit", "if permission is None:", "if False:"),
        f"{ROWS}a_method_that_is_not_in_the_table_is_denied_to_everybody",
    ),
    access(
        "any-role-anywhere",
        "a role in some tenant at least",
        edit("kvstore.security.guard:Guard.admit", "elif not identity.may_somewhere(permission.role):", "elif False:"),
        f"{ROWS}who_has_no_such_role_anywhere_is_not_let_in",
    ),
    access(
        "tenant-not-checked",
        "the role in the tenant",
        skip("kvstore.security.guard:Visit._check"),
        f"{ROWS}each_method_needs_what_its_operations_need",
    ),
    access(
        "role-order",
        "roles include those before alone",
        edit("kvstore.security.identity:Identity.may", "self.role_in(tenant) >= role", "bool(self.role_in(tenant))"),
        f"{RULES}roles_include_those_before_and_star_is_every_tenant",
    ),
    access(
        "making-a-namespace-needs-read",
        "making a namespace needs write",
        edit("kvstore.worker.service:Service._open_namespace", "role=Role.WRITE", "role=Role.READ"),
        f"{MATRIX}[cert:spiffe://test/reader, certificate]",
    ),
    access(
        "block-hold-of-another-namespace",
        "blocks are read under a hold of their namespace",
        edit(
            "kvstore.worker.prompts:Prompts.block_hold",
            "if hold.chain.namespace.digest != namespace.digest:",
            "if False:",
        ),
        "gc/test_block_holds.py::test_what_a_worker_refuses_of_holds_of_blocks[grpc]",
    ),
    access(
        "hold-of-another-tenant",
        "reading a hold needs read in its tenant",
        edit(
            "kvstore.worker.prompts:Prompts.held",
            "call.allow(hold.chain.namespace.tenant, hold.chain.namespace.name)",
            "pass",
        ),
        f"{MATRIX}[writer, good]",
    ),
    access(
        "pin-of-another-tenant",
        "unpinning needs write in its tenant",
        edit("kvstore.worker.pinning:PinCalls.unpin", "call.allow(pin.tenant, pin.namespace)", "pass"),
        f"{MATRIX}[writer, good]",
    ),
    access(
        "ticket-of-another-tenant",
        "a ticket is its tenant's own",
        edit("kvstore.worker.control.service:ControlService._found", "call.allow(ticket.tenant)", "pass"),
        f"{TICKETS}a_ticket_is_watched_by_who_may_read_and_ended_by_who_may_administer_its_tenant",
    ),
    access(
        "lists-show-all",
        "lists show what the caller may read",
        replace("kvstore.security.guard:Visit.may_see", lambda self, tenant: True),
        LISTS,
    ),
]

IDENTITIES = [
    access(
        "nobody-is-somebody",
        "without token and certificate nobody is known",
        edit("kvstore.security.authenticator:Authenticator.identify", "if not names:", "if False:"),
        f"{TOKENS}who_shows_nothing_is_not_known",
    ),
    access(
        "token-expired",
        "an expired token is none",
        edit(
            "kvstore.security.authenticator:Authenticator._refused",
            "if claims.expires_s + SKEW_S <= now_s:",
            "if False:",
        ),
        f"{TOKENS}a_token_ends_when_it_says",
    ),
    access(
        "token-revoked",
        "a revoked token is none",
        edit("kvstore.security.authenticator:Authenticator._refused", "if claims.id in loaded.revoked:", "if False:"),
        f"{TOKENS}a_revoked_token_is_none",
    ),
    access(
        "token-unbound",
        "a bound token needs its certificate",
        edit(
            "kvstore.security.authenticator:Authenticator._refused",
            "if claims.thumbprint and not hmac",
            "if False and not hmac",
        ),
        f"{TOKENS}a_bound_token_needs_its_certificate",
    ),
    access(
        "token-of-next-year",
        "no token counts before it was issued",
        edit(
            "kvstore.security.authenticator:Authenticator._refused",
            "if claims.issued_s - SKEW_S > now_s:",
            "if False:",
        ),
        f"{TOKENS}a_token_that_is_issued_in_the_future_is_none",
    ),
    access(
        "token-signature",
        "the signature of a token",
        edit(
            "kvstore.security.bearer:verified",
            '"verify_exp": False,',
            '"verify_exp": False, "verify_signature": False,',
        ),
        f"{TOKENS}a_token_signed_with_another_key_is_none",
    ),
    access(
        "token-any-key",
        "a token is signed with a key of the access file",
        edit(
            "kvstore.security.bearer:verified",
            "if key is None:",
            "key = key or next(iter(keys.values()))\n        if key is None:",
        ),
        f"{RULES}a_token_that_is_not_ours_is_not_valid",
    ),
    access(
        "token-audience",
        "a token is for kvstore",
        edit("kvstore.security.bearer:verified", '"verify_exp": False,', '"verify_exp": False, "verify_aud": False,'),
        f"{RULES}a_token_that_is_not_ours_is_not_valid",
    ),
    access(
        "token-long",
        "limits: bytes of a token",
        edit("kvstore.security.bearer:verified", "if len(token) > TOKEN_BYTES_MAX:", "if False:"),
        f"{TOKENS}a_token_over_the_limit_is_not_looked_at",
    ),
    access(
        "token-says-certificate",
        "a token names no certificate",
        edit("kvstore.security.bearer:_claims", "if identity.startswith(CERTIFICATE):", "if False:"),
        f"{RULES}a_token_that_is_not_ours_is_not_valid",
    ),
    access(
        "token-lives-for-ever",
        "a token lives 7 days at most",
        edit("kvstore.security.bearer:_claims", "if expires_s - issued_s > TTL_S_MAX:", "if False:"),
        f"{RULES}a_token_that_is_not_ours_is_not_valid",
    ),
    access(
        "unknown-binding",
        "a binding that is not understood is not none",
        edit("kvstore.security.bearer:_claims", "or not confirmation.keys() <= {_BINDING}", ""),
        f"{RULES}a_token_that_is_not_ours_is_not_valid",
    ),
    access(
        "client-ca-bulk",
        "mutual TLS: a bulk connection needs a certificate that the CA signed",
        edit("kvstore.security.tls:_context", "context.verify_mode = ssl.CERT_REQUIRED", "pass"),
        "security/test_mutual_tls.py::test_a_client_needs_a_certificate_that_the_authority_signed",
    ),
    access(
        "client-ca-grpc",
        "mutual TLS: a call needs a certificate that the CA signed",
        edit(
            "kvstore.wire.credentials:server_credentials",
            "require_client_authentication=asks_certificates",
            "require_client_authentication=False",
        ),
        f"{HOSTILE}wrong_handshakes_are_refused_and_change_nothing",
    ),
]

FILES = [
    access(
        "secret-readable",
        "X2: a secret that others can read is refused",
        edit("kvstore.security.secret_files:_check_secret", "if status.st_mode & forbidden:", "if False:"),
        f"{RULES}a_secret_that_others_can_read_is_refused",
    ),
    access(
        "access-file-writable",
        "X2: a file that others can change is not trusted",
        edit(
            "kvstore.security.secret_files:_check_trusted",
            "if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
            "if False:",
        ),
        f"{RULES}a_file_that_others_can_change_is_not_trusted",
    ),
    access(
        "files-of-anybody",
        "X2: a file of another user is not trusted",
        skip("kvstore.security.secret_files:_check_owner"),
        f"{RULES}root_may_hand_a_secret_to_a_group_and_nobody_else_may_hand_us_any",
    ),
    access(
        "misspelt-rule",
        "a rule with an unknown word is refused",
        edit("kvstore.security.rules:_object", "if unknown:", "if False:"),
        f"{RULES}an_access_file_that_is_wrong_is_refused",
    ),
    access(
        "repeated-rule",
        "a rule that is there twice is refused",
        edit("kvstore.security.rules:_without_repeats", "if len(found) != len(pairs):", "if False:"),
        f"{RULES}an_access_file_that_is_wrong_is_refused",
    ),
]

QUOTAS = [
    access(
        "calls-unbounded",
        "quota of calls at once",
        edit("kvstore.security.quotas:Meter.refusal", "if self.quota.calls_max is not None and", "if False and"),
        f"{RULES}calls_at_once_are_bounded_also_when_the_quota_changes",
    ),
    access(
        "requests-unbounded",
        "quota of requests",
        edit("kvstore.security.quotas:Meter.refusal", "self._requests.left(now_s) < 1", "False"),
        f"{RULES}requests_come_back_with_time",
    ),
    access(
        "bytes-unbounded",
        "quota of bytes",
        edit("kvstore.security.quotas:Meter.refusal", "bucket.left(now_s) < 0", "False"),
        f"{RULES}bytes_beyond_the_quota_are_a_debt_that_is_paid_first",
    ),
    access(
        "quota-change-forgets-calls",
        "calls of before a change of quota count",
        edit("kvstore.security.quotas:Meters.begin", "meter.inside = inside", "pass"),
        f"{RULES}calls_at_once_are_bounded_also_when_the_quota_changes",
    ),
]

DASHBOARD = [
    access(
        "dashboard-any-token",
        "the dashboard needs read in every tenant",
        edit("kvstore.dashboard.door:TokenDoor.admit", "if not identity.may(Role.READ, EVERY):", "if False:"),
        f"{WEB}only_a_token_that_may_read_every_tenant_sees_anything",
    ),
    access(
        "dashboard-any-host",
        "the dashboard is for this host",
        edit("kvstore.dashboard.door:OpenDoor.admit", "if self._is_local and not _is_this_host(host):", "if False:"),
        f"{WEB}another_name_that_leads_here_is_refused",
    ),
    access(
        "dashboard-no-door",
        "the dashboard asks for a token",
        skip("kvstore.dashboard.door:TokenDoor.admit"),
        f"{WEB}only_a_token_that_may_read_every_tenant_sees_anything",
    ),
]

WORKERS_QUESTIONS = [
    access(
        "question-of-anybody-read",
        "a question is read for a known caller alone",
        replace("kvstore.worker.questions:Questions.identify", lambda self, caller: None),
        f"{QUESTIONS}nobody_who_may_ask_nothing_has_a_question_read",
    ),
    access(
        "question-of-any-tenant",
        "a question needs read in its tenant",
        edit("kvstore.worker.questions:Questions.answer", "visit.allow(question.tenant, question.model)", "pass"),
        f"{QUESTIONS}a_worker_with_tls_answers_its_host_alone_and_whoever_may_read_the_tenant",
    ),
    access(
        "question-in-the-clear",
        "a worker with TLS answers questions of its host alone",
        edit("kvstore.worker.questions:Questions._presented", "self._for_host_alone and", "False and"),
        f"{QUESTIONS}a_worker_with_tls_answers_its_host_alone_and_whoever_may_read_the_tenant",
    ),
]

MUTANTS: list[Mutant] = [*PERMISSIONS, *IDENTITIES, *FILES, *QUOTAS, *DASHBOARD, *WORKERS_QUESTIONS]
